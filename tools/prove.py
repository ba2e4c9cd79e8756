"""Prove a config before it runs: its layout on CPU ranks against one rank, in float64.

    megafp8 prove configs/llama3-8b.yaml
    megafp8 prove configs/deepseek-v3.yaml --ranks 1024 parallel.schedule=zb-h1
    megafp8 prove my.yaml --out my.certificate.json
    megafp8 prove my.yaml --device cuda             # on the GPUs of a node, before the job

The command makes a small copy of the config that keeps every kind of layer, every axis of the layout and every option,
and prints the changes. Then up to 16 processes on this machine train the copy. The command checks that loss, gradients,
optimizer steps, FP8 recipe, checkpoint, resumption and data order are the same as on one rank, and that an export
computes the same in transformers. The certificate is printed as a table, and written as JSON next to the config. The
command needs neither GPUs nor data, and takes a minute or a few. docs/prove.md explains the coverage and the limits of
the proof.

With --device cuda, the small copy keeps the precision, kernels and CUDA graphs of the config. It runs through NCCL on
the GPUs of this machine. Losses, gradients and weights must be the same as on one CPU rank in float64, except for
rounding.

Exit code: 0 if nothing differs, 1 if something does, 2 for a config that cannot run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megafp8.commands import add_config_flags, parse_with_config
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.redaction import redact_arguments
from megafp8.host.tool import run_tool


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    add_config_flags(parser)
    parser.add_argument(
        "--ranks", type=at_least(1), help="number of ranks of the run; default: the fewest with data parallelism"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu",
        help="cpu: the layout in float64; cuda: this machine's GPUs, in the config's precision (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--stage", help="name of the stage of the run to prove; default: its beginning")
    file = "<config>.certificate.json, on GPUs <config>.cuda.certificate.json"
    parser.add_argument("--out", type=Path, help=f"file for the certificate; default: {file}")
    parser.add_argument(
        "--timeout",
        type=at_least(1),
        default=600,
        metavar="SECONDS",
        help="time limit of each run of the ranks (%(default)s)",
    )
    return parser


def certificate_path(config: str, out: Path | None, device: str) -> Path:
    """Return the path of the certificate. Raises ValueError if it is another file or cannot be written."""
    from megafp8.prove.certificate import FILES, is_certificate

    file = Path(config)  # a shipped config has only a name, and its certificate goes to the current folder
    path = out or Path(f"{file.with_suffix('') if file.exists() else file.name}.{FILES[device]}")
    if path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = None
        if not is_certificate(content):
            raise ValueError(f"{path} exists and is not a certificate; choose another file with --out")
    if not path.parent.is_dir():
        raise ValueError(f"--out: there is no folder {path.parent}")
    return path


def run(arguments: argparse.Namespace) -> bool:
    """Prove the config, print and write the certificate, and return whether it passed."""
    from megafp8.config import ConfigError, Problem, load_config, planned_stages
    from megafp8.prove.certificate import Certificate, CheckResult, describe_changes, hash_of, row_line
    from megafp8.prove.proof import prove
    from megafp8.training.init_from import complete_model

    out = certificate_path(arguments.config, arguments.out, arguments.device)
    config = load_config(arguments.config, arguments.overrides, complete_model)
    config_hash = hash_of(arguments.config, [*arguments.overrides, *filter(None, [arguments.stage])])
    if arguments.stage is not None:
        stages = {stage.name: stage.config for stage in planned_stages(config, arguments.config)}
        if arguments.stage not in stages:
            known = ", ".join(name for name in stages if name) or "no stages"
            raise ConfigError(arguments.config, [Problem("stages", arguments.stage, "not a stage of the run", known)])
        config = stages[arguments.stage]

    def begun(certificate: Certificate) -> None:
        before, after = certificate.ranks
        print(f"{config.name}: {before} ranks, as {after} processes of a small config. It differs in:")
        print("\n".join(describe_changes(certificate.changes)), flush=True)
        print(f"\n{'check':<22} {'result':<10} {'largest':>8} {'time':>8}  how", flush=True)

    def show(row: CheckResult) -> None:
        print(row_line(row), flush=True)
        if row.details:
            print(row.details, file=sys.stderr, flush=True)

    device, timeout = arguments.device, arguments.timeout
    certificate = prove(config, arguments.ranks, device=device, timeout=timeout, begun=begun, show=show)
    certificate.command, certificate.config_hash = arguments.command, config_hash
    out.write_text(certificate.as_json(), encoding="utf-8")
    result = "nothing differs" if certificate.passed else "NOT PROVEN"
    print(f"\n{result}; {certificate.seconds:.0f} s, {certificate.cpu_seconds:.0f} CPU seconds; {out}")
    return certificate.passed


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0; 1 if something differs; 2 for bad input."""
    arguments = parse_with_config(make_parser(), argv)
    words = sys.argv[1:] if argv is None else argv
    arguments.command = shlex.join(["megafp8", "prove", *redact_arguments(words)])
    passed = False

    def tool() -> None:
        nonlocal passed
        passed = run(arguments)

    return run_tool(tool) or int(not passed)


if __name__ == "__main__":
    sys.exit(main())
