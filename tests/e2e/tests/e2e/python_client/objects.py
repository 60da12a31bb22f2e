"""The Python client `kubernetes` with objects: typed, custom, and by the dynamic client."""

import json
import sys

from kubernetes import client, config, dynamic, watch
from kubernetes.client.exceptions import ApiException

NS = "default"
MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
PATIENCE = 60

config.load_kube_config(config_file=sys.argv[1])
core, apps = client.CoreV1Api(), client.AppsV1Api()


def refused(code, reason, call, *args, **kwargs):
    """The Status of a call that the server must refuse."""
    try:
        call(*args, **kwargs)
    except ApiException as error:
        status = json.loads(error.body)
        assert (error.status, status["code"], status["reason"]) == (code, code, reason), status
        return status
    raise AssertionError(f"{call} was not refused with {code}")


def until(call, is_it, *args, **kwargs):
    """Watches until an object is as wanted, and returns it."""
    for event in watch.Watch().stream(call, *args, timeout_seconds=PATIENCE, **kwargs):
        if is_it(event):
            return event["object"]
    raise AssertionError(f"{call} {args}: the wanted event did not come in {PATIENCE} s")


def config_maps():
    before = core.list_namespaced_config_map(NS).metadata.resource_version
    meta = client.V1ObjectMeta(name="a", labels={"app": "py"})
    body = client.V1ConfigMap(metadata=meta, data={"k": "1"})
    made = core.create_namespaced_config_map(NS, body)
    assert made.metadata.uid and made.metadata.creation_timestamp.tzinfo, made
    refused(409, "AlreadyExists", core.create_namespaced_config_map, NS, body)

    def patch(form, change, **more):
        return core.patch_namespaced_config_map("a", NS, change, _content_type=form, **more)

    assert patch(MERGE, {"data": {"k": None, "l": "2"}}).data == {"l": "2"}
    assert patch(JSON_PATCH, [{"op": "add", "path": "/data/m", "value": "3"}]).data == {"l": "2", "m": "3"}
    assert patch(STRATEGIC, {"data": {"$patch": "replace", "n": "4"}}).data == {"n": "4"}
    applied = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"n": "5"}}
    conflict = refused(409, "Conflict", patch, APPLY, applied, field_manager="py")
    assert conflict["details"]["causes"][0]["field"] == ".data.n", conflict
    forced = patch(APPLY, applied, field_manager="py", force=True)
    owners = [(entry.manager, entry.operation) for entry in forced.metadata.managed_fields]
    assert forced.data == {"n": "5"} and ("py", "Apply") in owners, forced
    refused(409, "Conflict", core.replace_namespaced_config_map, "a", NS, made)
    tried = core.patch_namespaced_config_map("a", NS, {"data": {"n": "6"}}, _content_type=MERGE, dry_run="All")
    assert tried.data == {"n": "6"} and core.read_namespaced_config_map("a", NS).data == {"n": "5"}
    listed = core.list_namespaced_config_map(NS, label_selector="app=py")
    assert [item.metadata.name for item in listed.items] == ["a"], listed
    first = core.list_namespaced_config_map(NS, limit=1)
    rest = core.list_namespaced_config_map(NS, limit=100, _continue=first.metadata._continue)
    names = [item.metadata.name for item in first.items + rest.items]
    assert names == ["a", "kube-root-ca.crt"], names

    # The history since the list, then a deletion that happens while the watch is open.
    events, versions = [], []
    watching = watch.Watch()
    for event in watching.stream(
        core.list_namespaced_config_map, NS, label_selector="app=py", resource_version=before, timeout_seconds=PATIENCE
    ):
        events.append(event["type"])
        versions.append(int(event["object"].metadata.resource_version))
        if len(events) == 5:
            core.delete_namespaced_config_map("a", NS)
        if event["type"] == "DELETED":
            watching.stop()
    assert events == ["ADDED", *["MODIFIED"] * 4, "DELETED"], events
    assert versions == sorted(set(versions)), versions
    refused(404, "NotFound", core.read_namespaced_config_map, "a", NS)


def deployments():
    labels = {"app": "web"}
    container = client.V1Container(name="web", image="example.com/web:1")
    template = client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels=labels), spec=client.V1PodSpec(containers=[container])
    )
    spec = client.V1DeploymentSpec(replicas=2, selector=client.V1LabelSelector(match_labels=labels), template=template)
    body = client.V1Deployment(metadata=client.V1ObjectMeta(name="web"), spec=spec)
    made = apps.create_namespaced_deployment(NS, body)
    assert made.spec.strategy.rolling_update.max_surge == "25%", made.spec.strategy
    assert apps.read_namespaced_deployment_scale("web", NS).spec.replicas == 2
    scaled = apps.patch_namespaced_deployment_scale("web", NS, {"spec": {"replicas": 3}}, _content_type=MERGE)
    assert scaled.spec.replicas == 3, scaled
    named = {"field_selector": "metadata.name=web"}
    until(apps.list_namespaced_deployment, lambda event: event["object"].status.replicas == 3, NS, **named)
    pods = core.list_namespaced_pod(NS, label_selector="app=web").items
    assert {pod.metadata.owner_references[0].kind for pod in pods} == {"ReplicaSet"} and len(pods) == 3, pods

    change = {"spec": {"template": {"spec": {"containers": [{"name": "web", "env": [{"name": "A", "value": "1"}]}]}}}}
    patched = apps.patch_namespaced_deployment("web", NS, change, _content_type=STRATEGIC)
    [container] = patched.spec.template.spec.containers
    assert (container.image, container.env[0].value) == ("example.com/web:1", "1"), container
    # One pod of the new revision beside the three of the old one, which no node runs.
    until(apps.list_namespaced_deployment, lambda event: event["object"].status.replicas == 4, NS, **named)
    status = refused(422, "Invalid", apps.patch_namespaced_deployment, "web", NS,
                     {"spec": {"selector": {"matchLabels": {"app": "x"}}}}, _content_type=MERGE)
    assert "field is immutable" in status["message"], status
    apps.delete_namespaced_deployment("web", NS, propagation_policy="Foreground")
    if apps.list_namespaced_deployment(NS, **named).items:
        until(apps.list_namespaced_deployment, lambda event: event["type"] == "DELETED", NS, **named)
    assert not core.list_namespaced_pod(NS, label_selector="app=web").items


def custom_objects():
    group, version, plural = "example.com", "v1", "widgets"
    schema = {"type": "object", "properties": {
        "spec": {"type": "object", "required": ["size"], "properties": {
            "size": {"type": "integer", "minimum": 1}, "colour": {"type": "string", "default": "red"}}},
        "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced",
                 "names": {"plural": plural, "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
                 "versions": [{"name": version, "served": True, "storage": True, "subresources": {"status": {}},
                               "schema": {"openAPIV3Schema": schema}}]}}
    extensions, custom = client.ApiextensionsV1Api(), client.CustomObjectsApi()
    extensions.create_custom_resource_definition(definition)

    def established(event):
        conditions = event["object"].status and event["object"].status.conditions
        return any(one.type == "Established" and one.status == "True" for one in conditions or [])

    until(extensions.list_custom_resource_definition, established, field_selector=f"metadata.name={plural}.{group}")

    def widget(name, size):
        return {"apiVersion": f"{group}/{version}", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": size}}

    place = (group, version, NS, plural)
    made = custom.create_namespaced_custom_object(*place, widget("w", 1))
    assert made["spec"] == {"size": 1, "colour": "red"}, made
    status = refused(422, "Invalid", custom.create_namespaced_custom_object, *place, widget("v", 0))
    assert "should be greater than or equal to 1" in status["message"], status
    patched = custom.patch_namespaced_custom_object(*place, "w", {"spec": {"size": 2}}, _content_type=MERGE)
    assert patched["spec"]["size"] == 2, patched
    set_ready = {"status": {"ready": True}}
    patched = custom.patch_namespaced_custom_object_status(*place, "w", set_ready, _content_type=MERGE)
    assert patched["status"] == {"ready": True}, patched
    listed = custom.list_namespaced_custom_object(*place)
    assert listed["kind"] == "WidgetList" and len(listed["items"]) == 1, listed

    found = dynamic.DynamicClient(client.ApiClient())
    widgets = found.resources.get(api_version=f"{group}/{version}", kind="Widget")
    applied = widgets.server_side_apply(widget("x", 3), namespace=NS, field_manager="py")
    assert applied.spec.size == 3 and applied.metadata.managedFields[0].operation == "Apply", applied
    refused(409, "Conflict", widgets.server_side_apply, widget("w", 4), namespace=NS, field_manager="py")
    applied = widgets.server_side_apply(widget("w", 4), namespace=NS, field_manager="py", force_conflicts=True)
    assert applied.spec.size == 4, applied
    patched = widgets.patch({"metadata": {"name": "x"}, "spec": {"colour": "blue"}}, namespace=NS, content_type=MERGE)
    assert patched.spec.colour == "blue", patched
    maps = found.resources.get(api_version="v1", kind="ConfigMap")
    maps.create({"metadata": {"name": "d"}, "data": {"k": "v"}}, namespace=NS)
    assert maps.get("d", NS).data.k == "v"
    maps.delete("d", NS)
    seen = []
    watching = watch.Watch()
    for event in widgets.watch(namespace=NS, resource_version=listed["metadata"]["resourceVersion"], timeout=PATIENCE,
                               watcher=watching):
        seen.append((event["type"], event["object"].metadata.name))
        if len(seen) == 3:
            widgets.delete("x", NS)
        if event["type"] == "DELETED":
            watching.stop()
    assert seen == [("ADDED", "x"), ("MODIFIED", "w"), ("MODIFIED", "x"), ("DELETED", "x")], seen
    custom.delete_namespaced_custom_object(*place, "w")
    refused(404, "NotFound", custom.get_namespaced_custom_object, *place, "w")
    extensions.delete_custom_resource_definition(f"{plural}.{group}")


def access():
    assert client.VersionApi().get_code().major == "1"
    groups = {group.name for group in client.ApisApi().get_api_versions().groups}
    assert {"apps", "batch", "apiextensions.k8s.io", "mayfly.dev"} <= groups, groups
    asked = {"spec": {"resourceAttributes": {"verb": "create", "group": "apps", "resource": "deployments"}}}
    review = client.AuthorizationV1Api().create_self_subject_access_review(asked)
    assert review.status.allowed, review
    token = core.create_namespaced_service_account_token("default", NS, {"spec": {}}).status.token
    own = client.Configuration.get_default_copy()
    own.refresh_api_key_hook = own.cert_file = own.key_file = None
    own.api_key = {"authorization": f"Bearer {token}"}
    limited = client.CoreV1Api(client.ApiClient(own))
    refused(403, "Forbidden", limited.list_namespaced_secret, NS)


for part in (access, config_maps, deployments, custom_objects):
    part()
print("objects as the Python client sees them")
