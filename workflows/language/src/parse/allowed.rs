//! Which fields a state may have, by its type and its query language.

use crate::definition::QueryLanguage;

/// A field and the language it belongs to; none for both.
type Field = (&'static str, Option<QueryLanguage>);

const JSON_PATH: Option<QueryLanguage> = Some(QueryLanguage::JsonPath);
const JSONATA: Option<QueryLanguage> = Some(QueryLanguage::Jsonata);

const EVERY_STATE: &[Field] = &[("Type", None), ("Comment", None), ("QueryLanguage", None)];
const DATA: &[Field] = &[("InputPath", JSON_PATH), ("OutputPath", JSON_PATH), ("Output", JSONATA)];
const ASSIGN: &[Field] = &[("Assign", None)];
const ONWARD: &[Field] = &[("Next", None), ("End", None)];
const TEMPLATE: &[Field] = &[("Parameters", JSON_PATH), ("ResultPath", JSON_PATH)];
const WORK: &[Field] = &[("ResultSelector", JSON_PATH), ("Retry", None), ("Catch", None)];
const PASS: &[Field] = &[("Result", JSON_PATH)];
const TASK: &[Field] = &[
    ("Resource", None),
    ("Arguments", JSONATA),
    ("TimeoutSeconds", None),
    ("TimeoutSecondsPath", JSON_PATH),
    ("HeartbeatSeconds", None),
    ("HeartbeatSecondsPath", JSON_PATH),
    ("Credentials", None),
];
const CHOICE: &[Field] = &[("Choices", None), ("Default", None)];
const WAIT: &[Field] =
    &[("Seconds", None), ("Timestamp", None), ("SecondsPath", JSON_PATH), ("TimestampPath", JSON_PATH)];
const FAIL: &[Field] =
    &[("Error", None), ("Cause", None), ("ErrorPath", JSON_PATH), ("CausePath", JSON_PATH)];
const PARALLEL: &[Field] = &[("Branches", None), ("Arguments", JSONATA)];
const MAP: &[Field] = &[
    ("ItemProcessor", None),
    ("Iterator", None),
    ("Items", JSONATA),
    ("ItemsPath", JSON_PATH),
    ("ItemSelector", None),
    ("ItemReader", None),
    ("ItemBatcher", None),
    ("ResultWriter", None),
    ("MaxConcurrency", None),
    ("MaxConcurrencyPath", JSON_PATH),
    ("ToleratedFailureCount", None),
    ("ToleratedFailureCountPath", JSON_PATH),
    ("ToleratedFailurePercentage", None),
    ("ToleratedFailurePercentagePath", JSON_PATH),
    ("Label", None),
];

/// The types of states, as AWS lists them.
pub(super) const TYPES: &[&str] = &["Task", "Wait", "Pass", "Succeed", "Fail", "Choice", "Parallel", "Map"];

fn groups(kind: &str) -> &'static [&'static [Field]] {
    match kind {
        "Task" => &[EVERY_STATE, DATA, ASSIGN, ONWARD, TEMPLATE, WORK, TASK],
        "Pass" => &[EVERY_STATE, DATA, ASSIGN, ONWARD, TEMPLATE, PASS],
        "Choice" => &[EVERY_STATE, DATA, ASSIGN, CHOICE],
        "Wait" => &[EVERY_STATE, DATA, ASSIGN, ONWARD, WAIT],
        "Succeed" => &[EVERY_STATE, DATA],
        "Fail" => &[EVERY_STATE, FAIL],
        "Parallel" => &[EVERY_STATE, DATA, ASSIGN, ONWARD, TEMPLATE, WORK, PARALLEL],
        "Map" => &[EVERY_STATE, DATA, ASSIGN, ONWARD, TEMPLATE, WORK, MAP],
        _ => &[EVERY_STATE],
    }
}

/// What is wrong with a state of this type having the field; none when nothing is.
pub(super) fn problem(kind: &str, language: QueryLanguage, field: &str) -> Option<String> {
    let known = groups(kind).iter().flat_map(|group| group.iter()).find(|(name, _)| *name == field);
    match known {
        None => Some(format!("Field '{field}' is not supported")),
        Some((_, Some(only))) if *only != language => Some(foreign(language, field, *only)),
        Some(_) => None,
    }
}

/// AWS's sentence about a field of the other language.
pub(super) fn foreign(language: QueryLanguage, field: &str, only: QueryLanguage) -> String {
    format!(
        "The QueryLanguage is set to '{language}', but field '{field}' is only supported for the '{only}' QueryLanguage"
    )
}
