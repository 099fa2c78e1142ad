"""A stand-in for ``nvidia-cuda-mps-control`` and its server, and what a program with CUDA does with them.

As the real one: ``-d`` starts a daemon that listens in CUDA_MPS_PIPE_DIRECTORY and writes into CUDA_MPS_LOG_DIRECTORY;
without options it passes lines of its stdin on to the daemon, which outlives its clients, however they end. A client
whose daemon does not answer runs without it. A fault of one client is a fault of all, and no one new is let in until
they have ended. FAKE_MPS=refuses: the daemon does not start; deaf: clients do not find it; stubborn: the server has no
environment, and does not end with the daemon; busy: the server lets no client in; held: no process gets the device
without it; listed: NVML lists its clients, in the file FAKE_NVML_PROCESSES.
"""

import os
import socket
import sys
from pathlib import Path

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered"
NOT_READY = "CUDA error: MPS server is not ready to accept new MPS client requests"
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
LOST = "CUDA error: the remote procedural call between the MPS server and the MPS client failed"

_SERVER = """#!{python} -IS
import time
time.sleep(3600)
"""
_CONTROL = """#!{python} -IS
import os, socket, subprocess, sys, time
from contextlib import suppress
pipe, logs = os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
server, clients, faulty = None, [], set()

def say(name, text):
    with open(f"{{logs}}/{{name}}.log", "a") as file:
        file.write(f"[2026-11-16 12:00:00.000 {{name.title()}} {{os.getpid()}}] {{text}}\\n")

def alive(pid):
    try:
        return open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

def start_server():
    global server
    if server is None or server.poll() is not None:
        env = {{}} if os.environ.get("FAKE_MPS") == "stubborn" else os.environ
        server = subprocess.Popen([__file__.replace("control", "server")], env=env)
        clients.clear()
        faulty.clear()
        say("control", f"Starting new server {{server.pid}} for user {{os.getuid()}}")

def answer(command="", *words):
    faulty.intersection_update([pid for pid in faulty if alive(pid)])
    if command == "start_server":
        start_server()
    elif command == "get_server_list" and server and server.poll() is None:
        return str(server.pid)
    elif command == "get_client_list":
        return "\\n".join(str(pid) for pid in clients if alive(pid))
    elif command == "client" and not faulty:
        start_server()
        clients.append(int(words[0]))
        say("server", f"Client {{{{PID: {{words[0]}}, Context ID: 1}}}} connected")
        return str(server.pid)
    elif command == "fault":
        faulty.update(pid for pid in clients if alive(pid))
    elif command == "state":
        return "faulty" if int(words[0]) in faulty else "fine" if server.poll() is None else "lost"
    return ""

def serve():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{{pipe}}/control")
    listener.listen(99)
    if os.fork():
        while not os.path.exists(f"{{pipe}}/nvidia-cuda-mps-control.pid"):
            time.sleep(0.01)
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(f"{{pipe}}/nvidia-cuda-mps-control.pid.new", "w") as file:
        file.write(f"{{os.getpid()}}")
    os.rename(file.name, file.name[:-4])
    say("control", f"Starting control daemon using socket {{pipe}}/control")
    while True:
        connection, _ = listener.accept()
        with connection, suppress(ConnectionError):  # a client may be killed before it has the answer
            words = connection.recv(999).decode().split()
            if words == ["quit"]:
                if server and os.environ.get("FAKE_MPS") != "stubborn":
                    server.kill()
                    server.wait()
                os.unlink(f"{{pipe}}/nvidia-cuda-mps-control.pid")
                os._exit(0)
            connection.sendall(answer(*words).encode())

if sys.argv[1:] == ["-d"]:
    if os.environ.get("FAKE_MPS") == "refuses":
        sys.exit("The user does not have the permission to start it")
    serve()
for line in sys.stdin:
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{{pipe}}/control")
        connection.sendall(line.encode())
        print(connection.recv(9999).decode())
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
"""


def install_fake_mps(folder: Path) -> dict[str, str]:
    """Write both programs; return the environment in which they are found."""
    from support.stand_ins import install  # not needed in the process of a client

    install(folder / SERVER, _SERVER.format(python=sys.executable))
    install(folder / CONTROL, _CONTROL.format(python=sys.executable))
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


_server: str | None = None


def tell_daemon(line: str) -> str | None:
    """Send a line to the daemon of this process; None: there is none."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{os.environ[PIPE]}/control")
            connection.sendall(line.encode())
            return connection.recv(999).decode()
    except (OSError, KeyError):
        return None


def use_device(*, faulty: bool = False) -> None:
    """Do something on the device, in a process with CUDA; it connects the first time."""
    global _server
    if os.environ.get("FAKE_MPS") == "busy" and tell_daemon("get_server_list") is not None:
        raise RuntimeError(NOT_READY)
    if _server is None and os.environ.get("FAKE_MPS") != "deaf":
        _server = tell_daemon(f"client {os.getpid()}")
        if _server == "":
            raise RuntimeError(NOT_READY)
        if os.environ.get("FAKE_MPS") == "listed":
            with Path(os.environ["FAKE_NVML_PROCESSES"]).open("a") as listed:
                listed.write(f"0:{os.getpid()}:512:-:m,")
    state = tell_daemon(f"state {os.getpid()}") if _server else None
    if faulty and _server:
        tell_daemon("fault")
    if faulty or state == "faulty":
        raise RuntimeError(ILLEGAL_ADDRESS)
    if state == "lost" or (_server and state is None and not Path(f"/proc/{_server}").exists()):
        raise RuntimeError(LOST)
