//! Events from outside: AWS's `PutEvents`, CloudEvents over HTTP, and the task `events:putEvents`.
//!
//! All three become an event in EventBridge's form (`source`, `detail-type`, `detail`, …), are matched against the
//! event triggers of all workflows and functions, and are answered when the starts are durable. There is one bus,
//! `default`; an event that starts nothing is not stored.
//!
//! ```text
//! CloudEvent   id  source  type         time  subject      data    extensions
//! event        id  source  detail-type  time  resources[0] detail  extensions
//! ```
//! A CloudEvent that is sent twice (the same `source` and `id`) starts nothing more; to `PutEvents` every entry is a
//! new event, as on AWS.

use http::HeaderMap;
use jiff::{SignedDuration, Timestamp};
use mayfly_api::workflow::names::{ACCOUNT, REGION};
use mayfly_workflows_engine::engine::{FunctionError, IntegrationCall, InvokeError};
use serde_json::{Map, Value, json};

use super::triggers::EventRules;

/// AWS's limits of one request.
const ENTRIES_MAX: usize = 10;
const ENTRIES_BYTES_MAX: usize = 256 << 10;
/// The one bus.
const BUS: &str = "default";
const RESOURCE: &str = "arn:aws:states:::events:putEvents";

/// `PutEvents`: each entry for itself.
///
/// # Errors
/// The request as a whole is none.
pub async fn put(events: &EventRules, request: &Value) -> Result<Value, String> {
    let entries = request["Entries"].as_array().map_or(&[][..], Vec::as_slice);
    if entries.is_empty() || entries.len() > ENTRIES_MAX {
        return Err(format!(
            "1 validation error detected: Value at 'entries' failed to satisfy constraint: Member must have length \
             between 1 and {ENTRIES_MAX}"
        ));
    }
    let bytes: usize = entries.iter().map(|entry| entry.to_string().len()).sum();
    if bytes > ENTRIES_BYTES_MAX {
        return Err("Total size of the entries in the request is over the limit.".into());
    }
    let (mut answers, mut failed) = (Vec::new(), 0);
    for entry in entries {
        let id = uuid::Uuid::new_v4().to_string();
        answers.push(match put_event(events, entry, &id).await {
            Ok(()) => json!({"EventId": id}),
            Err((code, why)) => {
                failed += 1;
                json!({"ErrorCode": code, "ErrorMessage": why})
            }
        });
    }
    Ok(json!({"FailedEntryCount": failed, "Entries": answers}))
}

async fn put_event(events: &EventRules, entry: &Value, id: &str) -> Result<(), (&'static str, String)> {
    let event = entry_event(entry, id, Timestamp::now())?;
    events.publish(&event, id).await.map_err(|why| ("InternalFailure", why))
}

/// An entry of `PutEvents` as an event.
fn entry_event(entry: &Value, id: &str, now: Timestamp) -> Result<Value, (&'static str, String)> {
    let text = |name: &str| entry[name].as_str().filter(|text| !text.is_empty());
    let needed = |name: &str| {
        let why = || {
            (
                "InvalidArgument",
                format!("Parameter {name} is not valid. Reason: {name} is a required argument."),
            )
        };
        text(name).ok_or_else(why)
    };
    let (source, kind, detail) = (needed("Source")?, needed("DetailType")?, needed("Detail")?);
    let detail: Value = serde_json::from_str(detail).unwrap_or_default();
    if !detail.is_object() {
        return Err(("MalformedDetail", "Detail is malformed.".into()));
    }
    if let Some(bus) = text("EventBusName").filter(|bus| *bus != BUS && !bus.ends_with(":event-bus/default"))
    {
        return Err(("InvalidArgument", format!("Event bus {bus} does not exist: there is one, {BUS}")));
    }
    // Seconds as a number, or RFC 3339, as some SDKs write it.
    let time = match &entry["Time"] {
        Value::String(text) => text.parse().ok(),
        seconds => seconds
            .as_f64()
            .and_then(|seconds| SignedDuration::try_from_secs_f64(seconds).ok())
            .and_then(|since| Timestamp::UNIX_EPOCH.checked_add(since).ok()),
    };
    let resources = entry["Resources"].as_array().cloned().unwrap_or_default();
    Ok(event(id, source, kind, time.unwrap_or(now), resources, detail))
}

fn event(id: &str, source: &str, kind: &str, time: Timestamp, resources: Vec<Value>, detail: Value) -> Value {
    json!({
        "version": "0",
        "id": id,
        "detail-type": kind,
        "source": source,
        "account": ACCOUNT,
        "time": super::seconds_text(time),
        "region": REGION,
        "resources": resources,
        "detail": detail,
    })
}

/// The events of a CloudEvents request, and what identifies each of them.
///
/// # Errors
/// One of them is none.
pub fn of_clouds(headers: &HeaderMap, body: &[u8]) -> Result<Vec<(Value, String)>, String> {
    let identified = |cloud: &Value| {
        let identity = format!("{}\n{}", cloud["source"], cloud["id"]);
        from_cloud(cloud, Timestamp::now()).map(|event| (event, identity))
    };
    received(headers, body)?.iter().map(identified).collect()
}

/// The events of a request, each as structured JSON.
fn received(headers: &HeaderMap, body: &[u8]) -> Result<Vec<Value>, String> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let content_type = text("content-type").unwrap_or_default().to_ascii_lowercase();
    let json = |body| {
        serde_json::from_slice::<Value>(body).map_err(|error| format!("the body is not JSON: {error}"))
    };
    if content_type.starts_with("application/cloudevents-batch+json") {
        return match json(body)? {
            Value::Array(events) => Ok(events),
            _ => Err("a batch of events is an array".into()),
        };
    }
    if content_type.starts_with("application/cloudevents+json") {
        return Ok(vec![json(body)?]);
    }
    if text("ce-specversion").is_none() {
        return Err("this is no CloudEvent: send application/cloudevents+json, or the header ce-specversion: 1.0 with \
                    ce-id, ce-source and ce-type"
            .into());
    }
    let mut cloud = Map::new();
    for (name, value) in headers {
        if let (Some(name), Ok(value)) = (name.as_str().strip_prefix("ce-"), value.to_str()) {
            cloud.insert(name.to_owned(), value.into());
        }
    }
    if !body.is_empty() {
        let is_json = content_type.is_empty() || content_type.contains("json");
        let data = if is_json { json(body)? } else { String::from_utf8_lossy(body).into_owned().into() };
        cloud.insert("data".into(), data);
    }
    Ok(vec![Value::Object(cloud)])
}

/// A structured CloudEvent as an event.
fn from_cloud(cloud: &Value, now: Timestamp) -> Result<Value, String> {
    const OWN: [&str; 10] = [
        "specversion",
        "id",
        "source",
        "type",
        "time",
        "subject",
        "data",
        "data_base64",
        "datacontenttype",
        "dataschema",
    ];
    let text = |name: &str| cloud[name].as_str().filter(|text| !text.is_empty());
    let needed =
        |name: &str| text(name).ok_or_else(|| format!("a CloudEvent has {name}, a text that is not empty"));
    if needed("specversion")? != "1.0" {
        return Err("only version 1.0 of CloudEvents is understood".into());
    }
    let (id, source, kind) = (needed("id")?, needed("source")?, needed("type")?);
    let time = match text("time") {
        Some(time) => time.parse().map_err(|_| "time is a timestamp as in RFC 3339".to_owned())?,
        None => now,
    };
    let subject: Vec<Value> = text("subject").map(Value::from).into_iter().collect();
    let data = cloud.get("data").or_else(|| cloud.get("data_base64")).cloned().unwrap_or_default();
    let mut event = event(id, source, kind, time, subject, data);
    let extensions: Map<String, Value> = cloud
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(name, _)| !OWN.contains(&name.as_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    if !extensions.is_empty() {
        event["extensions"] = Value::Object(extensions);
    }
    Ok(event)
}

/// The task `arn:aws:states:::events:putEvents`.
pub struct PutEvents(pub EventRules);

impl std::fmt::Debug for PutEvents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PutEvents").finish_non_exhaustive()
    }
}

impl PutEvents {
    /// Whether this is the resource of the task.
    pub(super) fn supports(resource: &str) -> bool {
        resource.strip_prefix(RESOURCE).is_some_and(|rest| matches!(rest, "" | ".waitForTaskToken"))
    }

    /// Publishes the events of a task.
    pub(super) async fn put(&self, call: IntegrationCall) -> Result<Value, InvokeError> {
        let mut request = call.arguments;
        // In a definition a detail is an object; in the API it is its text. Whose event it is stands among its
        // resources (the guide's page on EventBridge).
        for entry in request["Entries"].as_array_mut().into_iter().flatten() {
            if entry["Detail"].is_object() {
                entry["Detail"] = entry["Detail"].to_string().into();
            }
            let Some(entry) = entry.as_object_mut() else { continue };
            if let Some(resources) = entry.entry("Resources").or_insert_with(|| json!([])).as_array_mut() {
                let of = [call.origin.state_machine.as_str(), call.origin.execution.as_str()];
                resources.extend(of.map(|arn| json!(arn)));
            }
        }
        let answer = put(&self.0, &request).await;
        let answer = answer.map_err(|why| FunctionError::new("EventBridge.ValidationException", why))?;
        match answer["FailedEntryCount"] == 0 {
            true => Ok(answer),
            false => Err(FunctionError::new("EventBridge.FailedEntry", answer.to_string()).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        "2026-11-21T10:00:00Z".parse().unwrap()
    }

    #[test]
    fn entries_become_events() {
        let entry = json!({"Source": "shop", "DetailType": "Paid", "Detail": "{\"order\": 7}", "Time": 1_700_000_000,
            "Resources": ["r"]});
        let event = entry_event(&entry, "id-1", now()).unwrap();
        assert_eq!(
            event,
            json!({"version": "0", "id": "id-1", "detail-type": "Paid", "source": "shop",
            "account": ACCOUNT, "time": "2023-11-14T22:13:20Z", "region": REGION, "resources": ["r"], "detail": {"order": 7}})
        );
        for (change, code) in [
            (json!({"Source": null}), "InvalidArgument"),
            (json!({"DetailType": ""}), "InvalidArgument"),
            (json!({"Detail": null}), "InvalidArgument"),
            (json!({"Detail": "[1]"}), "MalformedDetail"),
            (json!({"Detail": "{"}), "MalformedDetail"),
            (json!({"EventBusName": "other"}), "InvalidArgument"),
        ] {
            let mut entry = entry.clone();
            json_patch::merge(&mut entry, &change);
            assert_eq!(entry_event(&entry, "id", now()).unwrap_err().0, code, "{change}");
        }
    }

    #[test]
    fn cloud_events_become_events() {
        let binary = |headers: &[(&'static str, &str)], body: &str| {
            let headers: HeaderMap = headers
                .iter()
                .map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()))
                .collect();
            received(&headers, body.as_bytes())
        };
        let ce = [
            ("ce-specversion", "1.0"),
            ("ce-id", "1"),
            ("ce-source", "/shop"),
            ("ce-type", "paid"),
            ("ce-region", "eu"),
            ("content-type", "application/json"),
        ];
        let told = binary(&ce, r#"{"order": 7}"#).unwrap();
        let event = from_cloud(&told[0], now()).unwrap();
        assert_eq!((&event["source"], &event["detail-type"]), (&json!("/shop"), &json!("paid")));
        assert_eq!((&event["detail"]["order"], &event["extensions"]["region"]), (&json!(7), &json!("eu")));
        let structured = r#"{"specversion": "1.0", "id": "1", "source": "/shop", "type": "paid", "region": "eu", "data": {"order": 7}}"#;
        let told =
            binary(&[("content-type", "application/cloudevents+json; charset=utf-8")], structured).unwrap();
        assert_eq!(from_cloud(&told[0], now()).unwrap(), event);
        let batch = format!("[{structured},{structured}]");
        assert_eq!(
            binary(&[("content-type", "application/cloudevents-batch+json")], &batch).unwrap().len(),
            2
        );
        assert!(
            binary(&[("content-type", "application/json")], "{}").unwrap_err().contains("ce-specversion")
        );
        for wrong in [
            json!({}),
            json!({"specversion": "0.3", "id": "1", "source": "s", "type": "t"}),
            json!({"specversion": "1.0", "id": "", "source": "s", "type": "t"}),
            json!({"specversion": "1.0", "id": "1", "source": "s", "type": "t", "time": "yesterday"}),
        ] {
            assert!(from_cloud(&wrong, now()).is_err(), "{wrong}");
        }
    }
}
