"""The command ``cuflash``: a module for each subcommand.

None imports CuPy before it needs a GPU or NVRTC.
"""

import click

from .. import __version__
from .bench import bench
from .check import check
from .explain import explain
from .info import info
from .warmup import warmup


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cuflash")
def main():
    """Exact attention for NVIDIA GPUs and the CPU: prove it here, see what runs where, compile ahead."""


for command in (bench, check, info, explain, warmup):
    main.add_command(command)
