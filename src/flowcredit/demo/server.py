"""Where the pages are served: on one address, to hosts that are expected, asking nobody for anything."""

import logging
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.middleware.base import RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware

from flowcredit.demo.page import mount

POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none';"
    " base-uri 'self'; form-action 'self'"
)
"""What the browser lets the pages ask for: this server alone. Gradio needs inline scripts."""


def serve(page: Any, listening: socket.socket, local: bool) -> None:
    """Serve until Ctrl-C, which is raised as KeyboardInterrupt once the server has closed.

    ``local``: only requests to this machine's own names are answered, so that no page from elsewhere reaches
    this one under a name of its own.
    """
    config = uvicorn.Config(
        application(page, local), log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    # What is cut short at the end is no fault: a page that is open holds a connection.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
    server.run(sockets=[listening])


def application(page: Any, local: bool) -> FastAPI:
    """The pages at ``/``."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    mount(app, page)

    @app.middleware("http")
    async def guarded(request: Request, call_next: RequestResponseEndpoint) -> Response:
        answer = await call_next(request)
        answer.headers["Content-Security-Policy"] = POLICY
        answer.headers["Referrer-Policy"] = "no-referrer"
        return answer

    if local:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    return app
