"""Every kind of state with real functions as tasks; the history event by event, as boto3 sees it."""

import json
import sys
import time

import boto3

ROLE = "arn:aws:iam::000000000000:role/workflows"
GREET = {"Type": "Task", "Resource": "arn:aws:states:::lambda:invoke", "OutputPath": "$.Payload.message"}
sfn = boto3.client("stepfunctions", endpoint_url=sys.argv[1])


def greet(payload, **more):
    return {**GREET, "Parameters": {"FunctionName": "greet", "Payload": payload}, **more}


def run(name, definition, given):
    """The ended execution and its events."""
    made = sfn.create_state_machine(name=name, definition=json.dumps(definition), roleArn=ROLE)
    arn = sfn.start_execution(stateMachineArn=made["stateMachineArn"], name="e", input=json.dumps(given))["executionArn"]
    end = time.monotonic() + 60
    while True:
        found = sfn.describe_execution(executionArn=arn)
        if found["status"] != "RUNNING":
            break
        assert time.monotonic() < end, f"{name} does not end"
        time.sleep(0.02)
    events = []
    for page in sfn.get_paginator("get_execution_history").paginate(executionArn=arn, maxResults=7):
        events.extend(page["events"])
    assert [event["id"] for event in events] == list(range(1, len(events) + 1)), "ids rise by one"
    times = [event["timestamp"] for event in events]
    assert times == sorted(times), "time does not run backwards"
    return found, events


def details(event):
    """The one member that says what the event is about."""
    names = [name for name in event if name.endswith("EventDetails")]
    assert len(names) <= 1, names
    return event[names[0]] if names else {}


def told(events):
    """`type < previous`, and the state's name where there is one."""
    lines = []
    for event in events:
        name = details(event).get("name")
        lines.append(f"{event['type']}{' ' + name if name else ''} < {event['previousEventId']}")
    return lines


def same(found, expected):
    for at, (one, other) in enumerate(zip(found, expected)):
        assert one == other, f"event {at + 1} is {one!r}, not {other!r}"
    assert len(found) == len(expected), f"{len(found)} events, not {len(expected)}: {found}"


def every_kind():
    definition = {
        "StartAt": "Pass",
        "States": {
            "Pass": {"Type": "Pass", "Result": {"names": ["Ada", "Grace"]}, "Next": "Wait"},
            "Wait": {"Type": "Wait", "Seconds": 1, "Next": "Choice"},
            "Choice": {
                "Type": "Choice",
                "Choices": [{"Variable": "$.names[0]", "StringEquals": "Ada", "Next": "Task"}],
                "Default": "Never",
            },
            "Never": {"Type": "Fail"},
            "Task": greet({"name.$": "$.names[0]"}, OutputPath="$", ResultSelector={"m.$": "$.Payload.message"},
                          ResultPath="$.task", Next="Both"),
            "Both": {
                "Type": "Parallel",
                "Branches": [
                    {"StartAt": "Left", "States": {"Left": greet({"name": "Left"}, End=True)}},
                    {"StartAt": "Right", "States": {"Right": {"Type": "Pass", "Result": 2, "End": True}}},
                ],
                "ResultPath": "$.both",
                "Next": "Each",
            },
            "Each": {
                "Type": "Map",
                "ItemsPath": "$.names",
                "MaxConcurrency": 1,
                "ItemProcessor": {"StartAt": "One", "States": {"One": greet({"name.$": "$"}, End=True)}},
                "ResultPath": "$.each",
                "Next": "Done",
            },
            "Done": {"Type": "Succeed"},
        },
    }
    found, events = run("every-kind", definition, {})
    assert found["status"] == "SUCCEEDED", found
    assert json.loads(found["output"]) == {
        "names": ["Ada", "Grace"],
        "task": {"m": "Hello, Ada!"},
        "both": ["Hello, Left!", 2],
        "each": ["Hello, Ada!", "Hello, Grace!"],
    }
    lines = told(events)
    same(lines[:16], [
        "ExecutionStarted < 0",
        "PassStateEntered Pass < 0",
        "PassStateExited Pass < 2",
        "WaitStateEntered Wait < 3",
        "WaitStateExited Wait < 4",
        "ChoiceStateEntered Choice < 5",
        "ChoiceStateExited Choice < 6",
        "TaskStateEntered Task < 7",
        "TaskScheduled < 8",
        "TaskStarted < 9",
        "TaskSucceeded < 10",
        "TaskStateExited Task < 11",
        "ParallelStateEntered Both < 12",
        "ParallelStateStarted < 13",
        "TaskStateEntered Left < 14",
        "TaskScheduled < 15",
    ])
    # The branches run side by side: what is certain is what follows what.
    kinds = [line.split(" <")[0] for line in lines[14:]]
    for kind in ["TaskStateEntered Left", "PassStateEntered Right", "PassStateExited Right", "TaskStateExited Left",
                 "ParallelStateSucceeded", "ParallelStateExited Both"]:
        assert kinds.count(kind) == 1, (kind, kinds)
    at = kinds.index("MapStateEntered Each")
    iteration = ["TaskStateEntered One", "TaskScheduled", "TaskStarted", "TaskSucceeded", "TaskStateExited One",
                 "MapIterationSucceeded Each"]
    assert kinds[at:] == [
        "MapStateEntered Each", "MapStateStarted",
        "MapIterationStarted Each", *iteration, "MapIterationStarted Each", *iteration,
        "MapStateSucceeded", "MapStateExited Each", "SucceedStateEntered Done", "SucceedStateExited Done",
        "ExecutionSucceeded",
    ], kinds[at:]
    started = details(events[0])
    assert started["input"] == "{}" and started["roleArn"] == ROLE and started["inputDetails"] == {"truncated": False}
    scheduled = details(events[8])
    assert (scheduled["resourceType"], scheduled["resource"], scheduled["region"]) == ("lambda", "invoke", "us-east-1")
    assert json.loads(scheduled["parameters"]) == {"FunctionName": "greet", "Payload": {"name": "Ada"}}
    assert details(events[9]) == {"resourceType": "lambda", "resource": "invoke"}
    answer = json.loads(details(events[10])["output"])
    assert answer["Payload"] == {"message": "Hello, Ada!"} and answer["StatusCode"] == 200, answer
    assert json.loads(details(events[11])["output"])["task"] == {"m": "Hello, Ada!"}


def errors():
    retry = [{"ErrorEquals": ["InvalidBody"], "IntervalSeconds": 1, "MaxAttempts": 1}]
    catch = [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.error", "Next": "Fail"}]
    definition = {
        "StartAt": "Greet",
        "States": {
            "Greet": greet({"nobody": 1}, Retry=retry, Catch=catch, End=True),
            "Fail": {"Type": "Fail", "ErrorPath": "$.error.Error", "Cause": "nobody to greet"},
        },
    }
    found, events = run("errors", definition, {})
    assert (found["status"], found["error"], found["cause"]) == ("FAILED", "InvalidBody", "nobody to greet"), found
    same(told(events), [
        "ExecutionStarted < 0",
        "TaskStateEntered Greet < 0",
        "TaskScheduled < 2",
        "TaskStarted < 3",
        "TaskFailed < 4",
        "TaskScheduled < 5",
        "TaskStarted < 6",
        "TaskFailed < 7",
        "TaskStateExited Greet < 8",
        "FailStateEntered Fail < 9",
        "ExecutionFailed < 10",
    ])
    failed = details(events[4])
    assert failed["error"] == "InvalidBody" and json.loads(failed["cause"])["errorType"] == "InvalidBody", failed
    assert (events[5]["timestamp"] - events[4]["timestamp"]).total_seconds() >= 1, "the back-off is waited for"
    assert details(events[10]) == {"error": "InvalidBody", "cause": "nobody to greet"}


def variables():
    definition = {
        "QueryLanguage": "JSONata",
        "StartAt": "Greet",
        "States": {
            "Greet": {
                "Type": "Task",
                "Resource": "arn:aws:lambda:us-east-1:000000000000:function:greet",
                "Arguments": {"name": "{% $uppercase($states.input.name) %}"},
                "Assign": {"greeting": "{% $states.result.message %}"},
                "Next": "Wait",
            },
            "Wait": {"Type": "Wait", "Seconds": 0, "Output": {"g": "{% $greeting %}"}, "End": True},
        },
    }
    found, events = run("variables", definition, {"name": "ada"})
    assert found["status"] == "SUCCEEDED" and json.loads(found["output"]) == {"g": "Hello, ADA!"}, found
    same(told(events), [
        "ExecutionStarted < 0",
        "TaskStateEntered Greet < 0",
        "LambdaFunctionScheduled < 2",
        "LambdaFunctionStarted < 3",
        "LambdaFunctionSucceeded < 4",
        "TaskStateExited Greet < 5",
        "WaitStateEntered Wait < 6",
        "WaitStateExited Wait < 7",
        "ExecutionSucceeded < 8",
    ])
    assert json.loads(details(events[5])["assignedVariables"]["greeting"]) == "Hello, ADA!"


every_kind()
errors()
variables()
print("every state, event by event")
