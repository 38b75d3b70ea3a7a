"""A reward service in plain Python, here for brightness: python reward_service.py 8765"""

import base64
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from PIL import Image, ImageStat


class Service(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"protocol": "flowcredit-reward/1", "name": "brightness"})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        images = [Image.open(io.BytesIO(base64.b64decode(png))) for png in request["images"]]
        self.answer({"scores": [sum(ImageStat.Stat(image).mean) / 3 / 255 for image in images]})

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Service)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
