"""The manifests of launch/kubernetes: against the published models of their APIs, and what their pods would run."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.config.load import load_config
from tests.test_launch import AGENT, ROOT, tools

__all__ = ["tools"]

KINDS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
REPLICAS = "replicas.yaml"  # a JobSet, too
MANIFESTS = {
    path.name if path.name == REPLICAS else document["kind"]: document
    for path in sorted((ROOT / "launch" / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}


def check(manifest: dict[str, Any]) -> None:
    """Raise if the API's model refuses the manifest, or does not know a field of it, which it drops."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert getattr(models, KINDS[manifest["kind"]]).from_dict(manifest).to_dict() == manifest


def job_of(kind: str) -> dict[str, Any]:
    """The Job that JobSet makes to train, as a dictionary; its pods are `["template"]["spec"]`."""
    spec = MANIFESTS[kind]["spec"]
    jobs = (spec["template"]["spec"] if kind == "TrainingRuntime" else spec)["replicatedJobs"]
    assert len(jobs) == (2 if kind == REPLICAS else 1)
    return jobs[-1]["template"]["spec"]


@pytest.mark.parametrize("kind", [*KINDS, REPLICAS])
def test_the_api_knows_every_field(kind: str) -> None:
    check(MANIFESTS[kind])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.restartPolicyy", "Never"),
        ("spec.restartPolicy", "Sometimes"),
        ("spec.terminationGracePeriodSeconds", "150"),
        ("spec.volumes.0.emptydir", {}),
        ("spec.containers.0.volumeMounts.0.path", "/dev/shm"),
        ("spec.containers.0.securityContext.capabilities.add", "IPC_LOCK"),
    ],
)
def test_the_check_finds_faults(path: str, value: object) -> None:
    manifest = copy.deepcopy(MANIFESTS["JobSet"])
    at = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name) if name.isdigit() else name]
    at[last] = value
    with pytest.raises((AssertionError, ValueError)):
        check(manifest)


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime", REPLICAS])
def test_pods_have_what_a_run_needs(kind: str) -> None:
    job = job_of(kind)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    # Time to save, then for the agents to agree on the end.
    assert pod["terminationGracePeriodSeconds"] > int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) + 30
    # An eviction must not look like the end of the run, a wrong config not like an eviction.
    rule = job["podFailurePolicy"]["rules"][-1]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert environment["STOPPED_EXIT_CODE"] not in ("0", "2")
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    claims = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: claims[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounts["/runs"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def pod_command(
    container: dict[str, Any], arguments: list[str], tools: dict[str, str], **injected: str
) -> subprocess.CompletedProcess[str]:
    """Run the container's command with fake programs; `injected`: variables of the controller and the pod's fields."""
    environment = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    command = [*container["command"], *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=tools | environment | injected, capture_output=True, text=True, timeout=30
    )


def test_commands_of_the_pods(tools: dict[str, str]) -> None:
    """Both make the same agent's command, with the head's name as JobSet and the trainer's controller give it."""
    job = job_of("JobSet")
    (replicated,) = MANIFESTS["JobSet"]["spec"]["replicatedJobs"]
    name, nodes = MANIFESTS["JobSet"]["metadata"]["name"], job["parallelism"]
    assert job["completions"] == nodes
    assert job["completionMode"] == "Indexed"
    (container,) = job["template"]["spec"]["containers"]
    done = pod_command(container, container["args"], tools, LOCAL_ADDR="10.0.0.7")
    head = f"{name}-{replicated['name']}-0-0.{name}"  # of the JobSet's documentation: network.enableDNSHostnames
    expected = f"{AGENT} --nnodes {nodes} --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint {head}:29400"
    arguments = " ".join(container["args"])
    rest = f"--rdzv-id megafp8 --max-restarts 3 --local-addr 10.0.0.7 pretrain --config {arguments}"
    assert done.stdout.splitlines()[0] == f"python {expected[len('python ') :]} {rest}", done.stderr

    trainer, job_name = MANIFESTS["TrainJob"]["spec"]["trainer"], MANIFESTS["TrainJob"]["metadata"]["name"]
    (container,) = job_of("TrainingRuntime")["template"]["spec"]["containers"]
    controller = {"PET_NNODES": str(trainer["numNodes"]), "PET_MASTER_PORT": "29500"}
    controller["PET_MASTER_ADDR"] = f"{job_name}-node-0-0.{job_name}"
    done = pod_command(container, trainer["args"], tools, LOCAL_ADDR="10.0.0.7", **controller)
    rendezvous = f"--rdzv-endpoint {controller['PET_MASTER_ADDR']}:29500"
    assert rendezvous in done.stdout.splitlines()[0], done.stderr
    assert done.stdout.splitlines()[0].endswith(f"pretrain --config {' '.join(trainer['args'])}")


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob", REPLICAS])
def test_configs_exist_and_their_overrides_are_keys(kind: str) -> None:
    spec = MANIFESTS[kind]["spec"]
    source = spec["trainer"] if kind == "TrainJob" else job_of(kind)["template"]["spec"]["containers"][0]
    config, *overrides = source["args"]
    assert load_config(str(Path(ROOT / config)), overrides).run_dir == "/runs"


def test_replicas_restart_alone_and_share_a_lighthouse(tools: dict[str, str]) -> None:
    spec = MANIFESTS[REPLICAS]["spec"]
    lighthouse, replica = spec["replicatedJobs"]
    jobs = {x["name"]: x["template"]["spec"] for x in (lighthouse, replica)}
    ignored, _ = jobs["replica"]["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert jobs["replica"]["backoffLimit"] > 0  # JobSet would restart all once a Job has failed
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["replica"]}
    (server,) = jobs["lighthouse"]["template"]["spec"]["containers"]
    (trainer,) = jobs["replica"]["template"]["spec"]["containers"]
    tokens = [[x for x in c["env"] if x["name"] == "MEGAFP8_LIGHTHOUSE_TOKEN"] for c in (server, trainer)]
    assert tokens[0] == tokens[1]
    assert tokens[0][0]["valueFrom"]["secretKeyRef"]["key"] == "token"

    variables = {x["name"]: x.get("value", "") for x in trainer["env"]}
    name, port = MANIFESTS[REPLICAS]["metadata"]["name"], server["command"][3].rpartition(":")[2]
    assert variables["MEGAFP8_LIGHTHOUSE"] == f"{name}-lighthouse-0-0.{name}:{port}"
    config = load_config(str(ROOT / trainer["args"][0]), trainer["args"][1:])
    replicas = config.resilience.replicas
    assert replicas is not None
    assert (replicas.count, str(replicas.min)) == (replica["replicas"], server["command"][-1])
    # As Kubernetes replaces variables in those that follow.
    names = [x["name"] for x in trainer["env"]]
    for key in ("HEAD_NODE", "RDZV_ID"):
        assert names.index("MEGAFP8_REPLICA") < names.index(key)
    replaced = {key: variables[key].replace("$(MEGAFP8_REPLICA)", "3") for key in ("HEAD_NODE", "RDZV_ID")}
    done = pod_command(trainer, trainer["args"], tools, LOCAL_ADDR="10.0.0.7", MEGAFP8_REPLICA="3", **replaced)
    assert f"--rdzv-endpoint {name}-replica-3-0.{name}:29400 --rdzv-id {name}-3 " in done.stdout, done.stderr
    assert jobs["replica"]["completions"] == jobs["replica"]["parallelism"] == int(variables["NNODES"])
