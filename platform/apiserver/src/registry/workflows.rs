//! Workflows and their executions.

use jiff::Timestamp;
use mayfly_api::{
    Execution, ObjectKey, Workflow, names,
    validation::FieldError,
    wellknown::ANNOTATION_LAST_APPLIED,
    workflow::{self, definition},
};
use mayfly_workflows_language::{
    tasks,
    validate::{Diagnostic, Severity, check},
};
use serde_json::{Value, json};

use super::{
    AGE, Backing, Column, Kind, NAME, immutable,
    mayfly::{fill_in, ready},
    print, typed,
};
use crate::object::Object;

/// The maximum number of reported problems of a definition.
const PROBLEMS_MAX: usize = 50;

pub(super) fn kinds() -> Vec<Kind> {
    vec![workflow(), execution()]
}

fn workflow() -> Kind {
    Kind {
        short_names: &["wf"],
        categories: &["all", "mayfly"],
        columns: const {
            &[
                NAME,
                Column::text("Type", "STANDARD or EXPRESS."),
                Column::text("Ready", "Whether executions can be started; otherwise the reason."),
                Column::text("Triggers", "The schedules and events that start executions."),
                AGE,
                Column::text("Next", "The time until the next scheduled execution.").wide(),
                Column::text("ARN", "The ARN in the Step Functions API.").wide(),
            ]
        },
        cells: |object, now| {
            vec![
                object.name().into(),
                object.str_at(&["spec", "type"]).into(),
                ready(object),
                print::or_none(&triggers(object)),
                print::age(object, now),
                next(object, now),
                print::or_none(object.str_at(&["status", "stateMachineArn"])),
            ]
        },
        selectable: &[("spec.type", "STANDARD")],
        defaults: |object| fill_in::<Workflow>(object),
        on_create: |object| {
            object.0.remove("status");
            restore_from_last_applied(object, &Object::default());
        },
        on_update: restore_from_last_applied,
        warn: |new| typed::<Workflow>(new).map_or_else(Vec::new, |workflow| definition_warnings(&workflow)),
        validate: |new, old| {
            let mut errors = Vec::new();
            immutable(new, old, &["spec", "type"], &mut errors);
            immutable(new, old, &["spec", "stateMachine"], &mut errors);
            // An unchanged spec was validated before.
            let changed = old.is_none_or(|old| new.0.get("spec") != old.0.get("spec"));
            if let Some(workflow) = typed::<Workflow>(new).filter(|_| changed) {
                errors.extend(definition_errors(&workflow));
                let key = ObjectKey::new(new.meta_str("namespace"), new.name());
                // A schedule that never fires is refused; the exact second of the check does not matter.
                errors.extend(workflow::validate(&key, &workflow.spec, Timestamp::now()));
            }
            errors
        },
        valid_name: names::dns_label,
        ..Kind::own::<Workflow>("Workflow", "workflows", "workflow")
    }
}

fn execution() -> Kind {
    Kind {
        short_names: &["exec", "execs"],
        categories: &["mayfly"],
        backing: Backing::View,
        verbs: super::verb_sets::READ_AND_WATCH,
        status: false,
        columns: const {
            &[
                NAME,
                Column::text("Workflow", "The Workflow that it executes."),
                Column::text("Status", "RUNNING, SUCCEEDED, FAILED, TIMED_OUT or ABORTED."),
                Column::text("Started", "How long ago it started."),
                Column::text("Duration", "The time from its start to its end, or until now."),
                Column::text("Error", "The error's name, when it did not succeed.").wide(),
            ]
        },
        cells: |object, now| {
            vec![
                object.name().into(),
                object.str_at(&["spec", "workflow"]).into(),
                object.str_at(&["status", "phase"]).into(),
                print::since(object.str_at(&["status", "startTime"]), now).into(),
                duration(object, now),
                print::or_none(object.str_at(&["status", "error"])),
            ]
        },
        selectable: &[("spec.workflow", ""), ("spec.name", ""), ("status.phase", "")],
        ..Kind::own::<Execution>("Execution", "executions", "execution")
    }
}

/// All errors of a definition or of tasks, each with its path, and with its code if it has one.
fn definition_errors(workflow: &Workflow) -> Vec<FieldError> {
    if !workflow.spec.tasks.is_null() {
        return tasks_errors(workflow);
    }
    let path = "spec.definition";
    if !workflow.spec.definition.is_object() && !workflow.spec.definition.is_string() {
        let detail = "a state machine in the Amazon States Language: an object with StartAt and States, or its JSON text";
        return vec![FieldError::invalid(path, "\"\"", detail)];
    }
    language_errors(workflow, path, &definition::text(&workflow.spec.definition))
}

fn tasks_errors(workflow: &Workflow) -> Vec<FieldError> {
    if !workflow.spec.definition.is_null() {
        let detail = "there is a definition already: a workflow has one of definition and tasks";
        return vec![FieldError::forbidden("spec.tasks", detail)];
    }
    match tasks::definition_text(&workflow.spec.tasks) {
        Ok(text) => language_errors(workflow, "spec.tasks", &text),
        Err(problems) => {
            let field = |place: &str| format!("spec{}", place.replace('/', "."));
            let errors = problems.into_iter().take(PROBLEMS_MAX);
            errors.map(|problem| FieldError::invalid(field(&problem.location), "", problem.message)).collect()
        }
    }
}

/// The errors of a definition's text, which the field `path` has or is compiled to.
fn language_errors(workflow: &Workflow, path: &str, text: &str) -> Vec<FieldError> {
    diagnostics(workflow, text, Severity::Error)
        .map(|problem| {
            let place = json!(problem.location.as_deref().unwrap_or("/"));
            FieldError::invalid(path, place, format!("{}: {}", problem.code.as_str(), problem.message))
        })
        .collect()
}

/// Warnings about a definition: unreachable states, a choice without a default, an unsupported integration.
fn definition_warnings(workflow: &Workflow) -> Vec<String> {
    let (path, text) = match workflow.spec.tasks.is_null() {
        true => ("spec.definition", definition::text(&workflow.spec.definition)),
        // Errors are reported by the validation.
        false => ("spec.tasks", tasks::definition_text(&workflow.spec.tasks).unwrap_or_default()),
    };
    diagnostics(workflow, &text, Severity::Warning)
        .map(|problem| {
            let place = problem.location.as_deref().unwrap_or("/");
            format!("{path}{place}: {} ({})", problem.message, problem.code.as_str())
        })
        .collect()
}

fn diagnostics(
    workflow: &Workflow,
    text: &str,
    severity: Severity,
) -> impl Iterator<Item = Diagnostic> + use<> {
    // The endpoints that the server calls are not known here.
    let found = check(text, workflow.spec.kind, |_| false);
    found.into_iter().filter(move |problem| problem.severity == severity).take(PROBLEMS_MAX)
}

/// Replaces the definition, or the tasks, by those in kubectl's last-applied annotation when the annotation is new.
/// `kubectl apply` drops nulls from the objects that it creates (`ResultPath: null` has a meaning), and later sends
/// JSON merge patches, in which a null deletes and which merge a definition into the stored one. The annotation has
/// the complete applied object.
fn restore_from_last_applied(new: &mut Object, old: &Object) {
    let note = |object: &Object| {
        object
            .at(&["metadata", "annotations", ANNOTATION_LAST_APPLIED])
            .and_then(Value::as_str)
            .map(str::to_owned)
    };
    let Some(applied) = note(new).filter(|applied| note(old).as_ref() != Some(applied)) else { return };
    let Ok(applied) = serde_json::from_str::<Value>(&applied) else { return };
    let form = |field: &str| applied["spec"].get(field).filter(|value| !value.is_null()).cloned();
    // A definition from the Step Functions API is removed when tasks are applied, and the reverse.
    let (field, other, value) = match (form("definition"), form("tasks")) {
        (Some(definition), None) => ("definition", "tasks", definition),
        (None, Some(tasks)) => ("tasks", "definition", tasks),
        _ => return,
    };
    let spec = new.map_mut("spec");
    spec.insert(field.into(), value);
    spec.remove(other);
}

/// `nightly: 0 3 * * *, paid: event`.
fn triggers(object: &Object) -> String {
    let shown = print::items(object, &["spec", "triggers"]).map(|trigger| {
        let name = trigger["name"].as_str().unwrap_or_default();
        let suspended = if trigger["suspend"] == true { " (suspended)" } else { "" };
        match trigger["schedule"]["cron"].as_str() {
            Some(cron) => format!("{name}: {cron}{suspended}"),
            None => format!("{name}: event{suspended}"),
        }
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// The time until the next start.
fn next(object: &Object, now: Timestamp) -> Value {
    let times = print::items(object, &["status", "triggers"])
        .filter_map(|trigger| trigger["nextScheduleTime"].as_str()?.parse::<Timestamp>().ok());
    match times.min() {
        Some(next) => {
            format!("in {}", print::human_duration(next.duration_since(now).as_secs().max(0))).into()
        }
        None => "<none>".into(),
    }
}

fn duration(object: &Object, now: Timestamp) -> Value {
    let at = |field: &str| object.str_at(&["status", field]).parse::<Timestamp>().ok();
    let Some(start) = at("startTime") else { return "<unknown>".into() };
    let took = at("stopTime").unwrap_or(now).duration_since(start);
    match took.as_millis() {
        ..1_000 => format!("{}ms", took.as_millis().max(0)).into(),
        1_000..10_000 => format!("{:.1}s", took.as_secs_f64()).into(),
        _ => print::human_duration(took.as_secs()).into(),
    }
}
