"""The Python client `kubernetes` with a running pod: exec, and logs that are followed."""

import sys

from kubernetes import client, config, stream, watch

NS = "default"
config.load_kube_config(config_file=sys.argv[1])
core = client.CoreV1Api()

script = "echo one; until [ -e /go ]; do busybox sleep 0.1; done; echo two; exec busybox sleep 86400"
container = client.V1Container(name="c", image="busybox:local", command=["sh", "-c", script])
spec = client.V1PodSpec(containers=[container], termination_grace_period_seconds=0)
core.create_namespaced_pod(NS, client.V1Pod(metadata=client.V1ObjectMeta(name="p"), spec=spec))
watching = watch.Watch()
for event in watching.stream(core.list_namespaced_pod, NS, field_selector="metadata.name=p", timeout_seconds=60):
    if event["object"].status.phase == "Running":
        watching.stop()
assert core.read_namespaced_pod("p", NS).status.phase == "Running"


def run(*command, **more):
    options = {"stdin": False, "stdout": True, "stderr": True, "tty": False, **more}
    return stream.stream(core.connect_get_namespaced_pod_exec, "p", NS, command=list(command), **options)


assert run("sh", "-c", "echo out; hostname") == "out\np\n"
failing = run("sh", "-c", "echo out; echo err >&2; exit 7", _preload_content=False)
failing.run_forever(timeout=60)
assert (failing.read_stdout(), failing.read_stderr(), failing.returncode) == ("out\n", "err\n", 7)
echo = run("sh", "-c", "while read line; do echo got $line; done", stdin=True, _preload_content=False)
for line in ("a", "b"):
    echo.write_stdin(f"{line}\n")
    assert echo.readline_stdout(timeout=60) == f"got {line}"
echo.close()

lines = []
following = watch.Watch()
for line in following.stream(core.read_namespaced_pod_log, "p", NS):
    lines.append(line)
    if line == "one":
        run("busybox", "touch", "/go")
    if line == "two":
        following.stop()
assert lines == ["one", "two"], lines
assert core.read_namespaced_pod_log("p", NS, tail_lines=1) == "two\n"
core.delete_namespaced_pod("p", NS, grace_period_seconds=0)
print("a pod as the Python client sees it")
