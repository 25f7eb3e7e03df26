"""`tenure console`: the live console of any store, for the user of this machine."""

from __future__ import annotations

import ipaddress
import socket
import webbrowser

import click

from tenure.cli.mistakes import Mistake, Status, after_signal
from tenure.cli.options import run_async, url_option
from tenure.cli.output import safe
from tenure.cli.store import check_there, chosen_url, shown_url
from tenure.clock import SystemClock
from tenure.engines import connect_engine, split_client_parameters

NEEDED = ("jinja2", "starlette", "uvicorn")


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:0",
    show_default=True,
    help="The address; port 0 is a free one.",
)
@click.option(
    "--administer",
    is_flag=True,
    help="Let the browser end sessions and evict requests.  [default: it only looks]",
)
@click.option(
    "--host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="A host name under which browsers reach it, besides addresses and localhost.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open a browser.")
@url_option
def console(listen: str, hosts: tuple[str, ...], *, administer: bool, open_browser: bool) -> int:
    """Show the store in the browser, live.

    Prints an address that signs one browser in, and after its use another one for the next browser.
    It only looks, unless --administer is given. Ctrl-C ends it (exit code 130).

    The connection is not encrypted. On an address other than this machine's own, put a proxy with
    TLS in front of it, or use a tunnel.
    """
    return run_async(_serve(listen, hosts, administer=administer, open_browser=open_browser))


async def _serve(
    listen: str, hosts: tuple[str, ...], *, administer: bool, open_browser: bool
) -> int:
    try:
        from tenure.console.local import serve_console
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        raise Mistake(
            Status.USAGE,
            f"tenure console needs {missing}; install it with: pip install 'tenure[console]'",
        ) from error
    url = chosen_url()
    check_there(url)
    store = connect_engine(split_client_parameters(url)[0], SystemClock())
    await store.open()
    try:
        with _listening(listen) as sock:
            place = _place(sock)
            first = True

            def show(token: str) -> None:
                nonlocal first
                address = f"http://{place}/sign-in?token={token}"
                if first:
                    what = "ends sessions and evicts requests, too" if administer else "only looks"
                    click.echo(f"the console of {safe(shown_url())}, which {what}; Ctrl-C ends it")
                    click.echo(address)
                else:
                    click.echo(f"a browser has signed in; the address for another one: {address}")
                if first and open_browser and not webbrowser.open(address):
                    click.echo("tenure: no browser was found; open the address", err=True)
                first = False

            number = await serve_console(store, sock, show, administer=administer, hosts=hosts)
            return Status.DONE if number is None else after_signal(number)
    finally:
        await store.aclose()


def _listening(listen: str) -> socket.socket:
    """Return a socket that is bound to an address."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(
            f"--listen is HOST:PORT, for example 127.0.0.1:0, not {listen!r}",
            click.get_current_context(),
        )
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Mistake(Status.USAGE, f"the address {listen} is not usable: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise Mistake(
            Status.STORE, f"cannot listen on {listen}: {error.strerror or error}"
        ) from error
    return sock


def _place(sock: socket.socket) -> str:
    """Return the host and port of a browser's address."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
