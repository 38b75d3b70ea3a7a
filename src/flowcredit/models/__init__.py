"""Flow models behind one interface: an adapter for each family, and flows known in closed form."""
