//! The validation of Workflows, except for the definition, which the language validates.

use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;

use super::{Schedule, Trigger, WorkflowSpec, names, pattern::Pattern, schedule::Times};
use crate::{ObjectKey, duration::Span, names::dns_label, validation::FieldError};

/// Maximum number of triggers of one workflow or function.
const TRIGGERS_MAX: usize = 100;
/// Longest name of a trigger: an execution's name has 80 characters, of which an event's id takes 37.
const TRIGGER_NAME_BYTES_MAX: usize = 40;
/// Maximum number of missed starts that can be caught up.
const CATCH_UP_MAX: u32 = 1_000;
/// Longest jitter.
const JITTER_MAX: Span = Span::from_secs(24 * 3600);

/// Validates a workflow's name and triggers, and returns all errors. `now`: a schedule has to have a time after it.
pub fn validate(key: &ObjectKey, spec: &WorkflowSpec, now: Timestamp) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match &spec.state_machine {
        None => {
            let name = names::state_machine_name(key);
            if name.chars().count() > names::STATE_MACHINE_CHARACTERS_MAX {
                let detail = format!(
                    "its state machine would be called {name}, and that is longer than the {} characters a \
                     state machine's name has at most",
                    names::STATE_MACHINE_CHARACTERS_MAX
                );
                errors.push(FieldError::invalid("metadata.name", format!("{:?}", key.name), detail));
            }
        }
        Some(name) if name.is_empty() => {
            let detail = "a name or an ARN; leave it out for the one that follows from the object's";
            errors.push(FieldError::invalid("spec.stateMachine", "\"\"", detail));
        }
        Some(name) if name.starts_with("arn:") && !name.contains(":stateMachine:") => {
            let detail = "that is not the ARN of a state machine";
            errors.push(FieldError::invalid("spec.stateMachine", format!("{name:?}"), detail));
        }
        Some(_) => {}
    }
    validate_triggers(&spec.triggers, now, &mut errors);
    errors
}

/// Validates the triggers of a workflow or a function, and adds all errors.
pub fn validate_triggers(triggers: &[Trigger], now: Timestamp, errors: &mut Vec<FieldError>) {
    if triggers.len() > TRIGGERS_MAX {
        let detail = format!("must have at most {TRIGGERS_MAX} triggers");
        errors.push(FieldError::invalid("spec.triggers", triggers.len(), detail));
    }
    let mut known = HashSet::new();
    for (at, trigger) in triggers.iter().enumerate() {
        let path = format!("spec.triggers[{at}]");
        if !known.insert(&trigger.name) {
            let kind = crate::validation::FieldErrorKind::Duplicate { value: format!("{:?}", trigger.name) };
            errors.push(FieldError { path: format!("{path}.name"), kind, detail: String::new() });
        }
        check(trigger, &path, now, errors);
    }
}

fn check(trigger: &Trigger, path: &str, now: Timestamp, errors: &mut Vec<FieldError>) {
    let shown = format!("{:?}", trigger.name);
    if let Err(why) = dns_label(&trigger.name) {
        errors.push(FieldError::invalid(format!("{path}.name"), &shown, why));
    } else if trigger.name.len() > TRIGGER_NAME_BYTES_MAX {
        let detail = format!("must be no more than {TRIGGER_NAME_BYTES_MAX} bytes");
        errors.push(FieldError::invalid(format!("{path}.name"), &shown, detail));
    }
    if trigger.schedule.is_some() == trigger.event.is_some() {
        errors.push(FieldError::invalid(path, &shown, "set exactly one of schedule and event"));
    }
    if let Some(schedule) = &trigger.schedule {
        check_schedule(schedule, &format!("{path}.schedule"), now, errors);
        if trigger.input_transform.is_some() {
            let detail = "there is no event to make the input from; use input";
            errors.push(FieldError::forbidden(format!("{path}.inputTransform"), detail));
        }
    }
    if let Some(event) = &trigger.event
        && let Err(problems) = Pattern::parse(&event.pattern)
    {
        for problem in problems {
            let place = if problem.path.is_empty() { String::new() } else { format!(".{}", problem.path) };
            let path = format!("{path}.event.pattern{place}");
            errors.push(FieldError::invalid(path, "\"\"", problem.message));
        }
    }
    if trigger.input.is_some() && trigger.input_transform.is_some() {
        errors.push(FieldError::forbidden(format!("{path}.inputTransform"), "there is an input already"));
    }
    if let Some(transform) = &trigger.input_transform {
        check_paths(&transform.paths, &format!("{path}.inputTransform.paths"), errors);
        for (at, name) in transform.unknown() {
            let path = format!("{path}.inputTransform.template{at}");
            let detail = "no path of that name is in paths; <event> is the whole event";
            errors.push(FieldError::invalid(path, format!("\"<{name}>\""), detail));
        }
    }
}

fn check_schedule(schedule: &Schedule, path: &str, now: Timestamp, errors: &mut Vec<FieldError>) {
    use super::schedule::InvalidSchedule::{Cron, Never, TimeZone};
    match Times::parse(&schedule.cron, schedule.time_zone.as_deref(), now) {
        Ok(_) => {}
        Err(why @ (Cron(_) | Never)) => {
            let shown = format!("{:?}", schedule.cron);
            errors.push(FieldError::invalid(format!("{path}.cron"), shown, why.to_string()));
        }
        Err(why @ TimeZone) => {
            let shown = format!("{:?}", schedule.time_zone.as_deref().unwrap_or_default());
            errors.push(FieldError::invalid(format!("{path}.timeZone"), shown, why.to_string()));
        }
    }
    if schedule.catch_up > CATCH_UP_MAX {
        let detail = format!("must be {CATCH_UP_MAX} or less");
        errors.push(FieldError::invalid(format!("{path}.catchUp"), schedule.catch_up, detail));
    }
    if schedule.jitter.is_some_and(|jitter| jitter > JITTER_MAX) {
        errors.push(FieldError::invalid(format!("{path}.jitter"), "\"\"", "must be a day or less"));
    }
}

fn check_paths(paths: &BTreeMap<String, String>, path: &str, errors: &mut Vec<FieldError>) {
    for (name, place) in paths {
        if !super::transform::is_name(name) {
            let detail = "a name has letters, digits, '_', '-' and '.'";
            errors.push(FieldError::invalid(path, format!("{name:?}"), detail));
        }
        if super::transform::EventPath::parse(place).is_none() {
            let detail = "a part of the event is written $.detail.items[0].name";
            errors.push(FieldError::invalid(format!("{path}.{name}"), format!("{place:?}"), detail));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(spec: serde_json::Value) -> Vec<String> {
        let spec: WorkflowSpec = serde_json::from_value(spec).unwrap();
        let now = "2026-11-21T10:00:00Z".parse().unwrap();
        let found = validate(&ObjectKey::new("default", "order"), &spec, now);
        found.into_iter().map(|error| error.path).collect()
    }

    #[test]
    fn triggers() {
        let good = json!({"definition": {}, "triggers": [
            {"name": "nightly", "schedule": {"cron": "0 3 * * *", "timeZone": "UTC", "overlap": "Forbid",
                "catchUp": 0, "startingDeadline": "1h", "jitter": "30s"}},
            {"name": "paid", "event": {"pattern": {"source": ["shop"]}},
                "inputTransform": {"paths": {"id": "$.detail.id"}, "template": {"order": "<id>", "all": "<event>"}}}]});
        assert_eq!(problems(good), Vec::<String>::new());
        let bad = json!({"definition": {}, "stateMachine": "", "triggers": [
            {"name": "Nightly", "schedule": {"cron": "x", "timeZone": "UTC"}},
            {"name": "a", "schedule": {"cron": "* * * * *", "timeZone": "Nowhere", "catchUp": 9999, "jitter": "48h"}},
            {"name": "a", "event": {"pattern": {"source": "shop"}}, "input": 1, "inputTransform": {"template": 1}},
            {"name": "b"},
            {"name": "c", "event": {"pattern": {"a": [1]}}, "inputTransform": {"paths": {"x y": "a"}, "template": 1}},
            {"name": "d", "event": {"pattern": {"a": [1]}},
                "inputTransform": {"paths": {"id": "$.id"}, "template": {"order": {"id": "<id>", "n": "no. <nope>"}}}}]});
        assert_eq!(
            problems(bad),
            [
                "spec.stateMachine",
                "spec.triggers[0].name",
                "spec.triggers[0].schedule.cron",
                "spec.triggers[1].schedule.timeZone",
                "spec.triggers[1].schedule.catchUp",
                "spec.triggers[1].schedule.jitter",
                "spec.triggers[2].name",
                "spec.triggers[2].event.pattern.source",
                "spec.triggers[2].inputTransform",
                "spec.triggers[3]",
                "spec.triggers[4].inputTransform.paths",
                "spec.triggers[4].inputTransform.paths.x y",
                "spec.triggers[5].inputTransform.template.order.n",
            ]
        );
    }
}
