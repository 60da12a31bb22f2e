//! One event of a history, and its form in the API.

use std::sync::Arc;

use mayfly_workflows_language::value::{Map, Value};
use serde_json::{Map as Json, Value as JsonValue, json};

/// One event of a history.
#[derive(Debug, Clone)]
pub struct HistoryEvent {
    /// 1, 2, 3…
    pub id: u64,
    /// The number of the preceding event; 0 for none.
    pub previous: u64,
    /// The time when its cause was journalled, in milliseconds since the epoch.
    pub at_ms: i64,
    /// The type, such as `TaskStateEntered`.
    pub kind: String,
    /// The details, with the name of their member.
    pub details: Option<EventDetails>,
}

/// The details of an event.
#[derive(Debug, Clone)]
pub struct EventDetails {
    /// The member's name, such as `stateEnteredEventDetails`.
    pub member: &'static str,
    /// The fields, in order; without absent ones.
    pub fields: Vec<(&'static str, DetailField)>,
}

/// A value inside the details.
#[derive(Debug, Clone)]
pub enum DetailField {
    /// A name, an ARN, an error.
    Text(Arc<str>),
    /// Execution data: omitted when the request excludes it; accompanied by `…Details: {"truncated": false}` when
    /// `true`.
    Data(Arc<str>, bool),
    /// A whole number.
    Number(u64),
    /// `assignedVariables`: each value as JSON text.
    Variables(Map),
    /// `taskCredentials`.
    Object(Value),
}

impl EventDetails {
    /// Details without fields.
    pub fn new(member: &'static str) -> Self {
        Self { member, fields: Vec::new() }
    }

    /// Adds a text.
    #[must_use]
    pub fn text(mut self, name: &'static str, text: impl Into<Arc<str>>) -> Self {
        self.fields.push((name, DetailField::Text(text.into())));
        self
    }

    /// Adds a text if there is one.
    #[must_use]
    pub fn maybe(self, name: &'static str, text: Option<&str>) -> Self {
        match text {
            Some(text) => self.text(name, text),
            None => self,
        }
    }

    /// Adds a number.
    #[must_use]
    pub fn number(mut self, name: &'static str, number: u64) -> Self {
        self.fields.push((name, DetailField::Number(number)));
        self
    }

    /// Adds a number if there is one.
    #[must_use]
    pub fn maybe_number(self, name: &'static str, number: Option<u64>) -> Self {
        match number {
            Some(number) => self.number(name, number),
            None => self,
        }
    }

    /// Adds execution data with its `…Details`.
    #[must_use]
    pub fn data(mut self, name: &'static str, text: impl Into<Arc<str>>) -> Self {
        self.fields.push((name, DetailField::Data(text.into(), true)));
        self
    }

    /// Adds execution data that has no `…Details` (`parameters`).
    #[must_use]
    pub fn bare_data(mut self, name: &'static str, text: impl Into<Arc<str>>) -> Self {
        self.fields.push((name, DetailField::Data(text.into(), false)));
        self
    }

    /// Adds any other field.
    #[must_use]
    pub fn field(mut self, name: &'static str, field: DetailField) -> Self {
        self.fields.push((name, field));
        self
    }

    fn to_json(&self, include_data: bool) -> JsonValue {
        let mut members = Json::new();
        for (name, field) in &self.fields {
            match field {
                DetailField::Text(text) => {
                    members.insert((*name).to_owned(), json!(&**text));
                }
                DetailField::Number(number) => {
                    members.insert((*name).to_owned(), json!(number));
                }
                DetailField::Data(text, with_details) => {
                    if include_data {
                        members.insert((*name).to_owned(), json!(&**text));
                    }
                    if *with_details && include_data {
                        members.insert(format!("{name}Details"), json!({"truncated": false}));
                    }
                }
                DetailField::Variables(variables) => {
                    if include_data {
                        let texts =
                            variables.iter().map(|(name, value)| (name.to_string(), json!(value.to_text())));
                        members.insert((*name).to_owned(), JsonValue::Object(texts.collect()));
                        members.insert(format!("{name}Details"), json!({"truncated": false}));
                    }
                }
                DetailField::Object(value) => {
                    members.insert((*name).to_owned(), value.to_serde());
                }
            }
        }
        JsonValue::Object(members)
    }
}

impl HistoryEvent {
    /// The event as in the response of `GetExecutionHistory`; the time in seconds.
    pub fn to_json(&self, include_data: bool) -> JsonValue {
        let mut event = Json::new();
        event.insert("id".to_owned(), json!(self.id));
        event.insert("previousEventId".to_owned(), json!(self.previous));
        event.insert("timestamp".to_owned(), seconds(self.at_ms));
        event.insert("type".to_owned(), json!(self.kind));
        if let Some(details) = &self.details {
            event.insert(details.member.to_owned(), details.to_json(include_data));
        }
        JsonValue::Object(event)
    }
}

/// Converts milliseconds to seconds, the unit of the API.
#[expect(clippy::cast_precision_loss, reason = "milliseconds of our millennium fit a double exactly")]
fn seconds(at_ms: i64) -> JsonValue {
    json!(at_ms as f64 / 1000.0)
}
