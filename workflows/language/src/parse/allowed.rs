//! The allowed fields of states and of the objects in them, by query language.

use super::fields::Fields;
use crate::definition::QueryLanguage;
use crate::validate::ProblemReport;

/// A field and its query language; `None` for both.
pub(super) type Field = (&'static str, Option<QueryLanguage>);

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

/// The types of states, in AWS's order.
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

pub(super) const RETRIER: &[Field] = &[
    ("ErrorEquals", None),
    ("IntervalSeconds", None),
    ("MaxAttempts", None),
    ("BackoffRate", None),
    ("MaxDelaySeconds", None),
    ("JitterStrategy", None),
];
pub(super) const CATCHER: &[Field] = &[
    ("ErrorEquals", None),
    ("Next", None),
    ("Assign", None),
    ("ResultPath", JSON_PATH),
    ("Output", JSONATA),
];
pub(super) const PROCESSOR_CONFIG: &[Field] = &[("Mode", None), ("ExecutionType", None)];
pub(super) const ITEM_READER: &[Field] =
    &[("Resource", None), ("ReaderConfig", None), ("Parameters", JSON_PATH), ("Arguments", JSONATA)];
pub(super) const READER_CONFIG: &[Field] = &[
    ("InputType", None),
    ("Transformation", None),
    ("ManifestType", None),
    ("CSVHeaderLocation", None),
    ("CSVHeaders", None),
    ("CSVDelimiter", None),
    ("ItemsPointer", None),
    ("MaxItems", None),
    ("MaxItemsPath", JSON_PATH),
];
pub(super) const ITEM_BATCHER: &[Field] = &[
    ("BatchInput", None),
    ("MaxItemsPerBatch", None),
    ("MaxItemsPerBatchPath", JSON_PATH),
    ("MaxInputBytesPerBatch", None),
    ("MaxInputBytesPerBatchPath", JSON_PATH),
];
pub(super) const RESULT_WRITER: &[Field] =
    &[("Resource", None), ("WriterConfig", None), ("Parameters", JSON_PATH), ("Arguments", JSONATA)];
pub(super) const WRITER_CONFIG: &[Field] = &[("OutputType", None), ("Transformation", None)];
pub(super) const CREDENTIALS: &[Field] = &[("RoleArn", None), ("RoleArn.$", JSON_PATH)];
pub(super) const JSONATA_RULE: &[Field] = &[
    ("Condition", None),
    ("Next", None),
    ("Assign", None),
    ("Output", None),
    ("Variable", JSON_PATH),
    ("And", JSON_PATH),
    ("Or", JSON_PATH),
    ("Not", JSON_PATH),
];

impl Fields<'_> {
    /// Reports fields that a state of this type does not have.
    pub(super) fn only_of_state(&self, kind: &str, report: &mut ProblemReport) {
        let known: Vec<Field> = groups(kind).concat();
        self.only(&known, report);
    }

    /// Reports fields that are not in `known`, or that belong to the other language. `Comment` is always allowed.
    pub(super) fn only(&self, known: &[Field], report: &mut ProblemReport) {
        for field in self.names().filter(|name| &***name != "Comment") {
            match known.iter().find(|(name, _)| *name == &**field) {
                None => report.schema(&self.at, format!("Field '{field}' is not supported")),
                Some((_, Some(only))) if *only != self.language => {
                    report.schema(&self.at, foreign(self.language, field, *only));
                }
                Some(_) => {}
            }
        }
    }
}

/// AWS's message about a field of the other language.
pub(super) fn foreign(language: QueryLanguage, field: &str, only: QueryLanguage) -> String {
    format!(
        "The QueryLanguage is set to '{language}', but field '{field}' is only supported for the '{only}' QueryLanguage"
    )
}
