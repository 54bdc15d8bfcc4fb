"""``vitlab ui``: the MLflow server on the results."""

import os
import shlex
import signal
import sys
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urljoin

import click

from vitlab.cli import print_json, say, wants_json
from vitlab.cli.completion import complete_study
from vitlab.cli.options import out_option
from vitlab.errors import UserError, VitlabError, list_some, nearest, public


@click.command()
@click.argument("study", required=False, shell_complete=complete_study)
@out_option
@click.option("--port", type=click.IntRange(1, 65535), default=5000, help="Port of the server.")
@click.option("--host", default="127.0.0.1", help="Interface to listen on; 0.0.0.0 for other machines.")
@click.option("--no-browser", is_flag=True, help="Print the addresses only.")
def ui_command(study: str | None, out: Path, port: int, host: str, no_browser: bool) -> None:
    """Open STUDY (by default the one that was run last) in MLflow, and serve the results until Ctrl-C.

    STUDY is a study's name or file, and its page shows curves and final values grouped by arm; NAME/arms is the table
    of its arms. The browser is opened where there is a display; the addresses of both pages are printed. Of a study
    that only another server has, the address of its page there is printed.
    """
    from vitlab.driver.progress import make_watch
    from vitlab.planning.packaged import stored_study_name
    from vitlab.trackers.server import host_for_url, running_server, study_links
    from vitlab.trackers.service import is_served

    base, root = f"http://{host_for_url(host)}:{port}", out.resolve()
    links = study_links(root)
    pages = {page: urljoin(f"{base}/", link) for page, link in links.items() if link.startswith(("#", "http"))}
    uri = public(os.environ.get("MLFLOW_TRACKING_URI", ""))
    elsewhere = f"; MLFLOW_TRACKING_URI names {uri}, which has what was delivered to it; open it there"
    elsewhere *= uri.startswith("http")  # no page shows a file
    name = next(iter(pages or links), "") if study is None else stored_study_name(study)
    if name not in pages:
        why = (
            f" It was delivered elsewhere; its folder says how to go on there: {links[name]}."
            if name in links
            else nearest(name, pages)
        )
        what, opened = f"study '{name}'" if name else "a study", ", ".join(sorted(pages)) or "none"
        raise UserError(
            f"{out} has no MLflow database with {what}{elsewhere}.{why} Studies to open: {opened}. To deliver what has "
            f"run, type: {shlex.join(['vitlab', 'sync', str(out), '--tracker', 'mlflow'])}"
        )
    # A kill must end the server, too, which is a child.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        server = None
        if links[name].startswith("#"):
            if elsewhere:
                say(f"showing the database in {out}{elsewhere}")
            if not is_served(base, name, root):
                with make_watch().status("starting MLflow"):  # its import takes seconds
                    server = stack.enter_context(running_server(root, port=port, host=host))
        if wants_json():
            print_json({"server": pages[name].partition("/#")[0], "pages": pages})
        opened = name.removesuffix("/arms")
        for page in filter(pages.get, (opened, f"{opened}/arms")):
            click.echo(f"{page}   {pages[page]}")
        if others := [page for page in pages if page != opened and not page.endswith("/arms")]:
            click.echo(f"'vitlab ui NAME' opens another study: {list_some(others)}.")
        has_display = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        # An output folder may come from other people, and with it the address of another server.
        if not no_browser and sys.stdout.isatty() and has_display and links[name].startswith("#"):
            webbrowser.open(pages[name])
        if server is None:
            if links[name].startswith("#"):
                say("Another process runs the server of this page.")
            return
        if host not in ("127.0.0.1", "localhost", "::1"):
            click.echo("No authentication: anyone who can reach this port can read and delete results.")
        click.echo(f"MLflow runs at {base}; Ctrl-C stops it. A cross closes its assistant, at the right.")
        click.echo("'Override saved view', above a view, makes this browser keep it when the page is reloaded.")
        try:
            code = server.wait()
        except KeyboardInterrupt:
            say("stopping MLflow")
            return
    raise VitlabError(f"MLflow's server ended by itself, with code {code}")
