"""``flowcredit demo``: load a run, serve its pages, end at Ctrl-C."""

import contextlib
import os
import signal
import socket
import threading
import webbrowser
from importlib.util import find_spec
from pathlib import Path

from flowcredit.config import Recipe
from flowcredit.demo.studio import open_studio
from flowcredit.errors import InputError
from flowcredit.rewards.endpoint import is_loopback


def demo_command(recipe: Recipe, run_dir: Path, host: str, port: int, show: bool) -> None:
    """Load what a run was made of, and serve its pages until Ctrl-C; ``show`` opens them in a browser.

    Raises InputError where gradio is missing, something cannot be loaded, or the address cannot be used.
    """
    if find_spec("gradio") is None:
        raise InputError(
            'the demo needs gradio, which is not installed; install it with: pip install "flowcredit[demo]"'
        )
    listening = _listening(host, port)
    with listening:
        # Read when gradio is imported.
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        studio = open_studio(recipe, run_dir)
        from flowcredit.demo.page import build_page
        from flowcredit.demo.server import serve

        page = build_page(studio)
        url = _url(host, listening.getsockname()[1])
        _listen_to_interrupts()
        print(f"demo of {run_dir} at {url} (Ctrl-C ends it)", flush=True)
        if not is_loopback(host):
            print(f"warning: --host {host} lets anyone on the network use it, without a password", flush=True)
        if show:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            serve(page, listening, is_loopback(host))
        print("stopped", flush=True)


def _listening(host: str, port: int) -> socket.socket:
    """A socket at the address; taken before anything is loaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        ) from None


def _url(host: str, port: int) -> str:
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reached}:{port}/"


def _listen_to_interrupts() -> None:
    """A shell starts what it puts in the background deaf to Ctrl-C and kill -INT."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
