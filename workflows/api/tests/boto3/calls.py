"""Every operation of the Step Functions API at least once, through boto3, against the endpoint named first."""

import json
import sys
import threading
import time

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

ROLE = "arn:aws:iam::000000000000:role/workflows"
called = set()


class Client:
    """Notes which operations were called."""

    def __init__(self, endpoint):
        config = Config(
            inject_host_prefix=False, retries={"max_attempts": 0}, parameter_validation=False, read_timeout=90
        )
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        self.inner = boto3.client("stepfunctions", endpoint_url=endpoint, config=config, **keys)

    def __getattr__(self, name):
        called.add(name)
        return getattr(self.inner, name)


def refused(code, call, **params):
    """The message with which a call is refused; the code has to be this one."""
    try:
        call(**params)
    except ClientError as error:
        found = error.response["Error"]
        assert found["Code"] == code, f"{found} is not {code}"
        assert error.response["ResponseMetadata"]["RequestId"], "a refusal has a request id"
        return found["Message"]
    raise AssertionError(f"not refused with {code}: {params}")


def machine(state, **more):
    return json.dumps({"StartAt": "S", "States": {"S": state}, **more})


def until(done, patience=20):
    """Asks until the answer is there."""
    end = time.monotonic() + patience
    while True:
        answer = done()
        if answer:
            return answer
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


def ended(sfn, arn):
    def done():
        found = sfn.describe_execution(executionArn=arn)
        return found if found["status"] != "RUNNING" else None

    return until(done)


def state_machines(sfn):
    made = sfn.create_state_machine(name="one", definition=machine({"Type": "Pass", "End": True}), roleArn=ROLE)
    arn = made["stateMachineArn"]
    assert arn == "arn:aws:states:us-east-1:000000000000:stateMachine:one"
    again = sfn.create_state_machine(name="one", definition=machine({"Type": "Pass", "End": True}), roleArn=ROLE)
    assert again["creationDate"] == made["creationDate"], "the same request again makes nothing new"
    other = machine({"Type": "Pass", "End": True, "Comment": "other"})
    message = refused("StateMachineAlreadyExists", sfn.create_state_machine, name="one", definition=other, roleArn=ROLE)
    assert message == f"State Machine Already Exists: '{arn}'"
    refused("InvalidName", sfn.create_state_machine, name="a b", definition=other, roleArn=ROLE)
    refused("InvalidDefinition", sfn.create_state_machine, name="bad", definition="{}", roleArn=ROLE)
    message = refused("ValidationException", sfn.create_state_machine, name="x" * 81, definition=other, roleArn=ROLE)
    assert message.endswith("Member must have length less than or equal to 80"), message
    described = sfn.describe_state_machine(stateMachineArn=arn)
    assert described["status"] == "ACTIVE" and described["type"] == "STANDARD" and "revisionId" not in described
    updated = sfn.update_state_machine(stateMachineArn=arn, definition=other, publish=True, versionDescription="v")
    assert updated["stateMachineVersionArn"] == f"{arn}:1"
    described = sfn.describe_state_machine(stateMachineArn=arn)
    assert described["revisionId"] == updated["revisionId"] and described["definition"] == other
    assert sfn.describe_state_machine(stateMachineArn=f"{arn}:1")["description"] == "v"
    message = refused("MissingRequiredParameter", sfn.update_state_machine, stateMachineArn=arn)
    assert message.startswith("Either the definition, the role ARN")
    listed = sfn.list_state_machines()["stateMachines"]
    assert [item["name"] for item in listed] == ["one"]
    checked = sfn.validate_state_machine_definition(definition=machine({"Type": "Nonsense"}))
    assert checked["result"] == "FAIL" and checked["diagnostics"][0]["severity"] == "ERROR"
    return arn


def versions_and_aliases(sfn, arn):
    published = sfn.publish_state_machine_version(stateMachineArn=arn, description="again")
    assert published["stateMachineVersionArn"] == f"{arn}:1", "a published revision is not published twice"
    third = machine({"Type": "Pass", "Result": 3, "End": True})
    sfn.update_state_machine(stateMachineArn=arn, definition=third)
    message = refused("ConflictException", sfn.publish_state_machine_version, stateMachineArn=arn, revisionId="x")
    assert message.startswith("Failed to publish the State Machine version for revision x.")
    sfn.publish_state_machine_version(stateMachineArn=arn)
    versions = [item["stateMachineVersionArn"] for item in sfn.list_state_machine_versions(stateMachineArn=arn)["stateMachineVersions"]]
    assert versions == [f"{arn}:2", f"{arn}:1"]
    routes = [{"stateMachineVersionArn": f"{arn}:1", "weight": 50}, {"stateMachineVersionArn": f"{arn}:2", "weight": 50}]
    alias = sfn.create_state_machine_alias(name="live", routingConfiguration=routes)["stateMachineAliasArn"]
    assert alias == f"{arn}:live"
    assert sfn.describe_state_machine_alias(stateMachineAliasArn=alias)["routingConfiguration"] == routes
    listed = sfn.list_state_machine_aliases(stateMachineArn=arn)["stateMachineAliases"]
    assert [item["stateMachineAliasArn"] for item in listed] == [alias]
    outputs = set()
    for _ in range(40):
        started = sfn.start_execution(stateMachineArn=alias)["executionArn"]
        found = ended(sfn, started)
        assert found["stateMachineAliasArn"] == alias
        outputs.add(found["output"])
    assert outputs == {"{}", "3"}, f"both versions of a weighted alias run: {outputs}"
    sfn.update_state_machine_alias(
        stateMachineAliasArn=alias, routingConfiguration=[{"stateMachineVersionArn": f"{arn}:2", "weight": 100}]
    )
    message = refused("ConflictException", sfn.delete_state_machine_version, stateMachineVersionArn=f"{arn}:2")
    assert message.endswith("aliases referencing this version: [live]")
    sfn.delete_state_machine_alias(stateMachineAliasArn=alias)
    refused("ResourceNotFound", sfn.describe_state_machine_alias, stateMachineAliasArn=alias)
    sfn.delete_state_machine_version(stateMachineVersionArn=f"{arn}:2")


def tags(sfn, arn):
    sfn.tag_resource(resourceArn=arn, tags=[{"key": "a", "value": "1"}, {"key": "b", "value": "2"}])
    sfn.untag_resource(resourceArn=arn, tagKeys=["a"])
    assert sfn.list_tags_for_resource(resourceArn=arn)["tags"] == [{"key": "b", "value": "2"}]
    refused("ResourceNotFound", sfn.list_tags_for_resource, resourceArn=arn + "x")


def executions(sfn, arn):
    started = sfn.start_execution(stateMachineArn=arn, name="first", input='{"a": 1}')["executionArn"]
    found = ended(sfn, started)
    assert found["status"] == "SUCCEEDED" and found["input"] == '{"a": 1}', found
    message = refused("ExecutionAlreadyExists", sfn.start_execution, stateMachineArn=arn, name="first", input="{}")
    assert message == f"Execution Already Exists: '{started}'"
    refused("InvalidExecutionInput", sfn.start_execution, stateMachineArn=arn, input="{")
    refused("StateMachineDoesNotExist", sfn.start_execution, stateMachineArn=arn + "x")
    refused("ExecutionDoesNotExist", sfn.describe_execution, executionArn=started + "x")
    history = sfn.get_execution_history(executionArn=started)["events"]
    assert [event["type"] for event in history] == [
        "ExecutionStarted", "PassStateEntered", "PassStateExited", "ExecutionSucceeded",
    ]
    page = sfn.get_execution_history(executionArn=started, maxResults=3)
    rest = sfn.get_execution_history(executionArn=started, maxResults=3, nextToken=page["nextToken"])
    assert [event["id"] for event in page["events"] + rest["events"]] == [1, 2, 3, 4]
    assert "nextToken" not in rest
    assert sfn.describe_state_machine_for_execution(executionArn=started)["name"] == "one"
    listed = sfn.list_executions(stateMachineArn=arn, statusFilter="SUCCEEDED", maxResults=2)
    assert len(listed["executions"]) == 2 and "nextToken" in listed
    refused("InvalidToken", sfn.list_executions, stateMachineArn=arn, nextToken="made-up")
    refused("ExecutionNotRedrivable", sfn.redrive_execution, executionArn=started)

    definition = machine({"Type": "Wait", "Seconds": 600, "End": True})
    waiting = sfn.create_state_machine(name="waiting", definition=definition, roleArn=ROLE)["stateMachineArn"]
    running = sfn.start_execution(stateMachineArn=waiting, name="w", input="{}")
    same = sfn.start_execution(stateMachineArn=waiting, name="w", input="{}")
    assert running["startDate"] == same["startDate"], "the same start again is the same execution"
    sfn.stop_execution(executionArn=running["executionArn"], error="Enough", cause="of this")
    found = ended(sfn, running["executionArn"])
    assert (found["status"], found["error"], found["cause"]) == ("ABORTED", "Enough", "of this")
    assert found["redriveStatus"] == "REDRIVABLE"
    sfn.redrive_execution(executionArn=running["executionArn"])
    found = sfn.describe_execution(executionArn=running["executionArn"])
    assert found["status"] == "RUNNING" and found["redriveCount"] == 1
    sfn.delete_state_machine(stateMachineArn=waiting)
    assert sfn.describe_state_machine(stateMachineArn=waiting)["status"] == "DELETING"
    sfn.stop_execution(executionArn=running["executionArn"])
    ended(sfn, running["executionArn"])
    refused("StateMachineDoesNotExist", sfn.describe_state_machine, stateMachineArn=waiting)


def express(sfn):
    definition = machine({"Type": "Pass", "Result": {"b": 2}, "End": True})
    made = sfn.create_state_machine(name="fast", definition=definition, roleArn=ROLE, type="EXPRESS")
    arn = made["stateMachineArn"]
    done = sfn.start_sync_execution(stateMachineArn=arn, input="{}")
    assert done["status"] == "SUCCEEDED" and done["output"] == '{"b":2}' and done["billingDetails"], done
    refused("StateMachineTypeNotSupported", sfn.list_executions, stateMachineArn=arn)
    refused("InvalidArn", sfn.describe_execution, executionArn=done["executionArn"])


def callbacks(sfn):
    activity = sfn.create_activity(name="work")["activityArn"]
    assert sfn.describe_activity(activityArn=activity)["name"] == "work"
    assert [item["name"] for item in sfn.list_activities()["activities"]] == ["work"]
    definition = machine({"Type": "Task", "Resource": activity, "HeartbeatSeconds": 60, "End": True})
    arn = sfn.create_state_machine(name="asks", definition=definition, roleArn=ROLE)["stateMachineArn"]
    answered = sfn.start_execution(stateMachineArn=arn, input='{"n":1}')["executionArn"]
    task = sfn.get_activity_task(activityArn=activity, workerName="one")
    assert json.loads(task["input"]) == {"n": 1}
    sfn.send_task_heartbeat(taskToken=task["taskToken"])
    sfn.send_task_success(taskToken=task["taskToken"], output='{"n":2}')
    assert ended(sfn, answered)["output"] == '{"n":2}'
    message = refused("TaskTimedOut", sfn.send_task_success, taskToken=task["taskToken"], output="1")
    assert message.startswith("Task Timed Out: ")
    refused("InvalidToken", sfn.send_task_heartbeat, taskToken="made-up")

    waits = []
    worker = threading.Thread(target=lambda: waits.append(sfn.get_activity_task(activityArn=activity)))
    worker.start()
    time.sleep(0.2)
    failed = sfn.start_execution(stateMachineArn=arn)["executionArn"]
    worker.join()
    sfn.send_task_failure(taskToken=waits[0]["taskToken"], error="Bad", cause="luck")
    found = ended(sfn, failed)
    assert (found["status"], found["error"], found["cause"]) == ("FAILED", "Bad", "luck")
    sfn.delete_activity(activityArn=activity)
    refused("ActivityDoesNotExist", sfn.describe_activity, activityArn=activity)


def map_runs(sfn):
    processor = {
        "ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
        "StartAt": "I",
        "States": {"I": {"Type": "Pass", "End": True}},
    }
    definition = machine({"Type": "Map", "ItemProcessor": processor, "MaxConcurrency": 2, "End": True})
    arn = sfn.create_state_machine(name="spread", definition=definition, roleArn=ROLE)["stateMachineArn"]
    started = sfn.start_execution(stateMachineArn=arn, input="[1,2,3]")["executionArn"]
    found = ended(sfn, started)
    assert found["output"] == "[1,2,3]", found
    run = sfn.list_map_runs(executionArn=started)["mapRuns"][0]["mapRunArn"]
    described = sfn.describe_map_run(mapRunArn=run)
    assert described["status"] == "SUCCEEDED" and described["itemCounts"]["succeeded"] == 3, described
    children = sfn.list_executions(mapRunArn=run)["executions"]
    assert len(children) == 3 and all(child["mapRunArn"] == run for child in children)
    child = sfn.describe_state_machine_for_execution(executionArn=children[0]["executionArn"])
    assert child["mapRunArn"] == run
    message = refused("ValidationException", sfn.update_map_run, mapRunArn=run, maxConcurrency=1)
    assert "completed" in message.lower(), message
    refused("ResourceNotFound", sfn.describe_map_run, mapRunArn=run + "x")


def tests(sfn):
    tested = sfn.test_state(
        definition=json.dumps({"Type": "Pass", "Result": 1, "ResultPath": "$.r", "Next": "N"}),
        input='{"a": 0}', inspectionLevel="DEBUG", roleArn=ROLE,
    )
    assert tested["status"] == "SUCCEEDED" and tested["nextState"] == "N"
    assert json.loads(tested["output"]) == {"a": 0, "r": 1}
    task = {"Type": "Task", "Resource": "arn:aws:states:::lambda:invoke", "Parameters": {"FunctionName": "f"}, "End": True}
    task["Catch"] = [{"ErrorEquals": ["States.ALL"], "Next": "N"}]
    tested = sfn.test_state(definition=json.dumps(task), mock={"errorOutput": {"error": "E", "cause": "C"}})
    assert (tested["status"], tested["nextState"]) == ("CAUGHT_ERROR", "N"), tested
    started = {"Type": "Task", "Resource": "arn:aws:states:::states:startExecution", "End": True}
    arn = "arn:aws:states:us-east-1:000000000000:stateMachine:one"
    started["Parameters"] = {"StateMachineArn": arn, "Input": {}}
    tested = sfn.test_state(definition=json.dumps(started), roleArn=ROLE)
    assert tested["status"] == "SUCCEEDED" and json.loads(tested["output"])["ExecutionArn"], tested


def main(endpoint):
    sfn = Client(endpoint)
    arn = state_machines(sfn)
    versions_and_aliases(sfn, arn)
    tags(sfn, arn)
    executions(sfn, arn)
    express(sfn)
    callbacks(sfn)
    map_runs(sfn)
    tests(sfn)
    sfn.delete_state_machine(stateMachineArn=arn)
    operations = set(sfn.inner.meta.method_to_api_mapping)
    missing = operations - called
    assert not missing, f"not called: {sorted(missing)}"
    print(f"{len(operations)} operations called")


main(sys.argv[1])
