//! CronJobs. The rules are upstream's (`pkg/apis/batch/{v1/defaults,validation}`, `pkg/registry/batch/cronjob`).

use k8s_openapi::api::batch::v1::CronJob;
use mayfly_api::{names, validation::FieldError};
use serde_json::{Map, Value, json};

use super::{
    Kind,
    apps::selector_text,
    columns,
    defaulting::{fill, map_in, template},
    pod, print, rules,
    workloads::containers,
};
use crate::object::Object;

/// A job's name is the CronJob's name, a dash and a number of minutes: 11 more bytes.
const NAME_BYTES_MAX: usize = names::LABEL_BYTES_MAX - 11;
const CONTAINERS: [&str; 6] = ["spec", "jobTemplate", "spec", "template", "spec", "containers"];

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        short_names: &["cj"],
        categories: &["all"],
        generation: true,
        columns: columns::CRON_JOB,
        cells: |object, now| {
            let suspended = rules::get(object, &["spec", "suspend"]).as_bool().unwrap_or(false);
            let last = match object.str_at(&["status", "lastScheduleTime"]) {
                "" => "<none>".to_owned(),
                time => print::since(time, now),
            };
            vec![
                object.name().into(),
                object.str_at(&["spec", "schedule"]).into(),
                print::or_none(object.str_at(&["spec", "timeZone"])),
                (if suspended { "True" } else { "False" }).into(),
                print::items(object, &["status", "active"]).count().into(),
                last.into(),
                print::age(object, now),
                containers(object, &CONTAINERS, "name"),
                containers(object, &CONTAINERS, "image"),
                print::or_none(&selector_text(object.at(&["spec", "jobTemplate", "spec", "selector"]))),
            ]
        },
        defaults: |object| {
            let spec = object.map_mut("spec");
            fill(
                spec,
                [
                    ("concurrencyPolicy", json!("Allow")),
                    ("suspend", json!(false)),
                    ("successfulJobsHistoryLimit", json!(3)),
                    ("failedJobsHistoryLimit", json!(1)),
                ],
            );
            if let Some(job) = map_in(spec, &["jobTemplate", "spec"]) {
                template(job, &["template"]);
            }
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({}));
        },
        validate,
        ..Kind::built_in::<CronJob>("cronjob")
    }]
}

fn validate(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    if old.is_none() && new.name().len() > NAME_BYTES_MAX {
        let detail = format!("must be no more than {NAME_BYTES_MAX} characters");
        errors.push(FieldError::invalid("metadata.name", format!("{:?}", new.name()), detail));
    }
    let schedule = rules::text(spec, "schedule");
    if schedule.is_empty() {
        errors.push(FieldError::required("spec.schedule", ""));
    } else if let Err(why) = cron(schedule) {
        errors.push(FieldError::invalid("spec.schedule", format!("{schedule:?}"), why));
    }
    // A schedule that had a time zone before `timeZone` existed remains valid.
    let had_zone = old.is_some_and(|old| old.str_at(&["spec", "schedule"]).contains("TZ"));
    if schedule.contains("TZ") && had_zone && !spec["timeZone"].is_null() {
        let detail = "cannot use both timeZone field and TZ or CRON_TZ in schedule";
        errors.push(FieldError::invalid("spec.schedule", format!("{schedule:?}"), detail));
    } else if schedule.contains("TZ") && !had_zone {
        let detail = "cannot use TZ or CRON_TZ in schedule, use timeZone field instead";
        errors.push(FieldError::invalid("spec.schedule", format!("{schedule:?}"), detail));
    }
    if let Some(zone) = spec["timeZone"].as_str() {
        if zone.is_empty() {
            errors.push(FieldError::invalid(
                "spec.timeZone",
                "\"\"",
                "timeZone must be nil or non-empty string",
            ));
        } else if jiff::tz::TimeZone::get(zone).is_err() {
            let why = format!("unknown time zone {zone}");
            errors.push(FieldError::invalid("spec.timeZone", format!("{zone:?}"), why));
        }
    }
    for field in ["startingDeadlineSeconds", "successfulJobsHistoryLimit", "failedJobsHistoryLimit"] {
        rules::non_negative(&spec[field], &format!("spec.{field}"), &mut errors);
    }
    let policies = ["Allow", "Forbid", "Replace"];
    rules::one_of(rules::text(spec, "concurrencyPolicy"), &policies, "spec.concurrencyPolicy", &mut errors);
    let none = Map::new();
    let path = ["spec", "jobTemplate", "spec", "template", "spec"];
    let pod_spec = new.at(&path).and_then(Value::as_object).unwrap_or(&none);
    pod::pod_spec_errors(pod_spec, &path.join("."), &mut errors);
    let policy = pod_spec.get("restartPolicy").and_then(Value::as_str).unwrap_or("Always");
    let policy_path = format!("{}.restartPolicy", path.join("."));
    match policy {
        "Never" | "OnFailure" => {}
        "Always" => errors.push(FieldError::required(policy_path, "valid values: \"OnFailure\", \"Never\"")),
        other => errors.push(rules::not_supported(policy_path, other, &["OnFailure", "Never"])),
    }
    errors
}

/// Checks a standard cron expression: five fields, or a descriptor such as `@daily`. The messages are those of
/// `robfig/cron`.
fn cron(text: &str) -> Result<(), String> {
    let mut text = text;
    if let Some(zone) = text.strip_prefix("TZ=").or_else(|| text.strip_prefix("CRON_TZ=")) {
        let (zone, rest) = zone.split_once(' ').unwrap_or((zone, ""));
        if jiff::tz::TimeZone::get(zone).is_err() {
            return Err(format!("provided bad location {zone}: unknown time zone {zone}"));
        }
        text = rest.trim();
    }
    if let Some(word) = text.strip_prefix('@') {
        let known = ["yearly", "annually", "monthly", "weekly", "daily", "midnight", "hourly"];
        let every = word.strip_prefix("every ").is_some_and(|rest| !rest.trim().is_empty());
        return match known.contains(&word) || every {
            true => Ok(()),
            false => Err(format!("unrecognized descriptor: {text}")),
        };
    }
    let fields: Vec<_> = text.split_whitespace().collect();
    if fields.len() != 5 {
        let list = fields.join(" ");
        return Err(format!("expected exactly 5 fields, found {}: [{list}]", fields.len()));
    }
    const MONTHS: [&str; 12] =
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
    const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
    let ranges: [(u32, u32, &[&str]); 5] =
        [(0, 59, &[]), (0, 23, &[]), (1, 31, &[]), (1, 12, &MONTHS), (0, 6, &DAYS)];
    for (field, (min, max, words)) in fields.iter().zip(ranges) {
        field.split(',').try_for_each(|part| cron_part(part, min, max, words))?;
    }
    Ok(())
}

fn cron_part(part: &str, min: u32, max: u32, words: &[&str]) -> Result<(), String> {
    let (range, step) = match part.split_once('/') {
        Some((range, step)) => (range, Some(step)),
        None => (part, None),
    };
    if let Some(step) = step {
        let step: u32 = step.parse().map_err(|_| {
            format!("failed to parse int from {step}: strconv.Atoi: parsing {step:?}: invalid syntax")
        })?;
        if step == 0 {
            return Err(format!("step of range should be a positive number: {part}"));
        }
    }
    if matches!(range, "*" | "?") {
        return Ok(());
    }
    let number = |text: &str| -> Result<u32, String> {
        if let Some(at) = words.iter().position(|word| word.eq_ignore_ascii_case(text)) {
            return Ok(u32::try_from(at).unwrap_or(0) + min);
        }
        text.parse().map_err(|_| {
            format!("failed to parse int from {text}: strconv.Atoi: parsing {text:?}: invalid syntax")
        })
    };
    let (low, high) = match range.split_once('-') {
        Some((low, high)) => (number(low)?, number(high)?),
        None => (number(range)?, number(range)?),
    };
    match () {
        () if low < min => Err(format!("beginning of range ({low}) below minimum ({min}): {part}")),
        () if high > max => Err(format!("end of range ({high}) above maximum ({max}): {part}")),
        () if low > high => Err(format!("beginning of range ({low}) beyond end of range ({high}): {part}")),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cron_expressions() {
        for good in ["* * * * *", "*/5 0 1,15 jan-mar sun", "@daily", "0 0 1 1 *", "TZ=UTC 0 0 * * *"] {
            assert_eq!(cron(good), Ok(()), "{good}");
        }
        for (bad, why) in [
            ("* * * *", "expected exactly 5 fields, found 4: [* * * *]"),
            ("60 * * * *", "end of range (60) above maximum (59): 60"),
            ("x * * * *", "failed to parse int from x: strconv.Atoi: parsing \"x\": invalid syntax"),
            ("TZ=Nowhere 0 0 * * *", "provided bad location Nowhere: unknown time zone Nowhere"),
            ("@never", "unrecognized descriptor: @never"),
        ] {
            assert_eq!(cron(bad).unwrap_err(), why);
        }
    }
}
