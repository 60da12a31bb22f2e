//! Reading parameters that the model has checked, and writing answers.

use serde_json::{Map, Value};

/// A string parameter; parameters that the model requires are present.
pub(crate) fn text<'a>(params: &'a Value, name: &str) -> &'a str {
    optional(params, name).unwrap_or_default()
}

/// A string parameter that may be missing.
pub(crate) fn optional<'a>(params: &'a Value, name: &str) -> Option<&'a str> {
    params.get(name).and_then(Value::as_str)
}

/// A flag that may be missing.
pub(crate) fn flag(params: &Value, name: &str) -> Option<bool> {
    params.get(name).and_then(Value::as_bool)
}

/// A date as awsJson1_0 has it: seconds since the epoch, with milliseconds.
pub(crate) fn date(milliseconds: i64) -> Value {
    Value::from(milliseconds as f64 / 1000.0)
}

/// An answer under construction; absent fields are left out, as AWS leaves them out.
#[derive(Default)]
pub(crate) struct ResponseFields(Map<String, Value>);

impl ResponseFields {
    pub(crate) fn set(mut self, name: &str, value: impl Into<Value>) -> ResponseFields {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    pub(crate) fn maybe(self, name: &str, value: Option<impl Into<Value>>) -> ResponseFields {
        match value {
            Some(value) => self.set(name, value),
            None => self,
        }
    }

    pub(crate) fn done(self) -> Value {
        Value::Object(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn absent_fields_stay_absent_and_dates_keep_their_milliseconds() {
        let answer =
            ResponseFields::default().set("a", date(1_700_000_000_123)).maybe("b", None::<String>).done();
        assert_eq!(answer, json!({"a": 1_700_000_000.123}));
    }
}
