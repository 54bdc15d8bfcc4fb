"""``vitlab ui``: the MLflow server on the results."""

import os
import signal
import sys
import webbrowser
from contextlib import ExitStack
from pathlib import Path

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
    of its arms. The browser is opened where there is a display; the addresses of both pages are printed.
    """
    from vitlab.driver.progress import make_watch
    from vitlab.planning.packaged import stored_study_name
    from vitlab.trackers.server import host_for_url, running_server, study_links

    base, root = f"http://{host_for_url(host)}:{port}", out.resolve()
    pages = study_links(root, base)
    uri = public(os.environ.get("MLFLOW_TRACKING_URI", ""))
    elsewhere = f"; MLFLOW_TRACKING_URI names {uri}, which has what was delivered to it; open it there"
    if not uri or Path(uri.partition(":///")[2]).resolve() == root / "mlflow.db":
        elsewhere = ""
    if not pages:
        raise UserError(f"{out} has no MLflow database with a study{elsewhere or ': vitlab run or sync makes one'}.")
    if elsewhere:
        say(f"showing the database in {out}{elsewhere}")
    name = next(iter(pages)) if study is None else stored_study_name(study)
    if name not in pages:
        raise UserError(
            f"study '{name}' has not been delivered to MLflow in {out}.{nearest(name, pages)} Studies there: "
            f"{', '.join(sorted(pages))}."
        )
    # A kill must end the server, too, which is a child.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        with make_watch().status("starting MLflow"):  # its import takes seconds
            server = stack.enter_context(running_server(root, port=port, host=host, page=pages[name]))
        if wants_json():
            print_json({"server": base, "pages": pages})
        opened = name.removesuffix("/arms")
        for page in filter(pages.get, (opened, f"{opened}/arms")):
            click.echo(f"{page}   {pages[page]}")
        if others := [page for page in pages if page != opened and not page.endswith("/arms")]:
            click.echo(f"'vitlab ui NAME' opens another study: {list_some(others)}.")
        if host not in ("127.0.0.1", "localhost", "::1"):
            click.echo("No authentication: anyone who can reach this port can read and delete results.")
        click.echo(f"MLflow runs at {base}; Ctrl-C stops it. A cross closes its assistant, at the right.")
        click.echo("'Override saved view', above a view, makes this browser keep it when the page is reloaded.")
        has_display = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if not no_browser and sys.stdout.isatty() and has_display:
            webbrowser.open(pages[name])
        try:
            code = server.wait()
        except KeyboardInterrupt:
            say("stopping MLflow")
            return
    raise VitlabError(f"MLflow's server ended by itself, with code {code}")
