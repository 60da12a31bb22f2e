//! `mayfly describe`: an object in readable form: every field, the conditions and the events as tables.

use clap::Args;
use jiff::Timestamp;
use serde_json::{Map, Value};

use super::{
    failure::{ErrorCode, Failure},
    format::age,
    get::targets,
    output,
    server::{Server, with_query},
    session::Session,
    table,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly describe function hello")]
pub(crate) struct DescribeArgs {
    /// KIND [NAME…], or KIND/NAME…
    #[arg(value_name = "KIND [NAME]", required = true)]
    what: Vec<String>,
    /// In all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Only objects with these labels
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<String>,
}

pub(crate) async fn run(args: DescribeArgs, session: &Session) -> anyhow::Result<()> {
    let server = session.server().await?;
    let own = session.namespace().await?;
    let namespace = if args.all_namespaces { None } else { Some(own.as_str()) };
    let mut objects = Vec::new();
    for target in targets(session.discovery().await?, &args.what)? {
        for name in &target.names {
            objects.push(server.get(&target.kind.object(&own, name)).await?);
        }
        if target.names.is_empty() {
            let query = [("labelSelector", args.selector.as_deref())];
            let list = server.get(&with_query(&target.kind.collection(namespace), &query)).await?;
            for item in list["items"].as_array().into_iter().flatten() {
                let mut item = item.clone();
                item["apiVersion"] = target.kind.api_version().into();
                item["kind"] = target.kind.kind.clone().into();
                objects.push(item);
            }
        }
    }
    if objects.is_empty() {
        return Err(Failure::error(
            ErrorCode::NotFound,
            "no objects to describe",
            "see what there is: mayfly get KIND -A",
        ));
    }
    let texts = objects.iter().map(|object| describe_one(server, object));
    let texts = futures::future::try_join_all(texts).await?;
    output::out(texts.join("\n\n"))?;
    Ok(())
}

async fn describe_one(server: &Server, object: &Value) -> anyhow::Result<String> {
    let now = Timestamp::now();
    let events = events_of(server, object).await?;
    Ok(text(object, &events, now))
}

/// The events about an object, oldest first.
async fn events_of(server: &Server, object: &Value) -> anyhow::Result<Vec<Value>> {
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().unwrap_or("");
    let path = match metadata["namespace"].as_str() {
        Some(namespace) => format!("/api/v1/namespaces/{}/events", super::server::segment(namespace)),
        None => "/api/v1/events".into(),
    };
    let fields = format!("involvedObject.name={name}");
    let mut list = server.get(&with_query(&path, &[("fieldSelector", Some(&fields))])).await?;
    let mut events = list["items"].as_array_mut().map(std::mem::take).unwrap_or_default();
    events.retain(|event| event["involvedObject"]["uid"] == metadata["uid"]);
    events.sort_by(|a, b| last_seen(a).cmp(&last_seen(b)));
    Ok(events)
}

fn last_seen(event: &Value) -> Option<&str> {
    let times = ["/series/lastObservedTime", "/lastTimestamp", "/eventTime", "/metadata/creationTimestamp"];
    times.iter().find_map(|pointer| event.pointer(pointer).and_then(Value::as_str))
}

/// The whole description.
fn text(object: &Value, events: &[Value], now: Timestamp) -> String {
    let mut object = object.clone();
    // Sorted, so that fields are easy to find.
    object.sort_all_objects();
    let metadata = &object["metadata"];
    let mut out = Lines::default();
    out.field(0, "Name", metadata["name"].as_str().unwrap_or(""));
    if let Some(namespace) = metadata["namespace"].as_str() {
        out.field(0, "Namespace", namespace);
    }
    let kind = object["kind"].as_str().unwrap_or("");
    out.field(0, "Kind", &format!("{kind} ({})", object["apiVersion"].as_str().unwrap_or("")));
    let created = metadata["creationTimestamp"].as_str();
    out.field(0, "Created", &format!("{} ({} ago)", created.unwrap_or(""), age(created, now)));
    if let Some(deleted) = metadata["deletionTimestamp"].as_str() {
        out.field(0, "Deleting", &format!("since {deleted}"));
    }
    out.map(0, "Labels", &metadata["labels"]);
    out.map(0, "Annotations", &metadata["annotations"]);
    for owner in metadata["ownerReferences"].as_array().into_iter().flatten() {
        let text = |field: &str| owner[field].as_str().unwrap_or("").to_owned();
        out.field(0, "Owner", &format!("{}/{}", text("kind"), text("name")));
    }
    let mut conditions = Vec::new();
    for (key, value) in object.as_object().into_iter().flatten() {
        if ["apiVersion", "kind", "metadata"].contains(&key.as_str()) {
            continue;
        }
        let mut value = value.clone();
        if key == "status"
            && let Some(found) = value.as_object_mut().and_then(|status| status.remove("conditions"))
        {
            conditions = found.as_array().cloned().unwrap_or_default();
        }
        if key == "data" && kind == "Secret" {
            hide(&mut value);
        }
        out.value(0, &title(key), &value);
    }
    let mut text = out.0;
    text.push_str(&conditions_table(&conditions, now));
    text.push_str(&events_table(events, now));
    text
}

/// A Secret's values are shown as their sizes.
fn hide(data: &mut Value) {
    use base64::Engine as _;
    for value in data.as_object_mut().into_iter().flat_map(Map::values_mut) {
        let decoded = base64::engine::general_purpose::STANDARD.decode(value.as_str().unwrap_or(""));
        *value = super::format::bytes(decoded.map_or(0, |bytes| bytes.len() as u64)).into();
    }
}

fn conditions_table(conditions: &[Value], now: Timestamp) -> String {
    if conditions.is_empty() {
        return String::new();
    }
    let rows: Vec<Vec<String>> = conditions
        .iter()
        .map(|condition| {
            let text = |field: &str| condition[field].as_str().unwrap_or("").to_owned();
            let since = age(condition["lastTransitionTime"].as_str(), now);
            vec![text("type"), text("status"), since, text("reason"), text("message")]
        })
        .collect();
    format!(
        "Conditions:\n{}",
        indented(&table::render(&["TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"], &rows))
    )
}

fn events_table(events: &[Value], now: Timestamp) -> String {
    if events.is_empty() {
        return "Events:  none\n".into();
    }
    let rows: Vec<Vec<String>> = events
        .iter()
        .map(|event| {
            let text =
                |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or("").to_owned();
            let count = event.pointer("/series/count").or_else(|| event.get("count"));
            let times = match count.and_then(Value::as_i64) {
                Some(count) if count > 1 => format!(" (x{count})"),
                _ => String::new(),
            };
            let from = match text("/source/component") {
                from if from.is_empty() => text("/reportingComponent"),
                from => from,
            };
            let seen = format!("{}{times}", age(last_seen(event), now));
            vec![seen, text("/type"), text("/reason"), from, text("/message").replace('\n', " ")]
        })
        .collect();
    format!(
        "Events:\n{}",
        indented(&table::render(&["LAST SEEN", "TYPE", "REASON", "FROM", "MESSAGE"], &rows))
    )
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// `latestReadyRevision` → `Latest Ready Revision`.
fn title(field: &str) -> String {
    let mut title = String::with_capacity(field.len() + 4);
    let mut before: Option<char> = None;
    for letter in field.chars() {
        match before {
            None => title.extend(letter.to_uppercase()),
            Some(before) => {
                if letter.is_uppercase() && before.is_lowercase() {
                    title.push(' ');
                }
                title.push(letter);
            }
        }
        before = Some(letter);
    }
    title
}

/// Indented `Key:  value` lines.
#[derive(Default)]
struct Lines(String);

impl Lines {
    fn field(&mut self, depth: usize, key: &str, value: &str) {
        let indent = "  ".repeat(depth);
        if value.contains('\n') {
            self.0.push_str(&format!("{indent}{key}:\n"));
            for line in value.lines() {
                self.0.push_str(&format!("{indent}  {line}\n"));
            }
        } else {
            self.0.push_str(&format!("{indent}{key}:  {value}\n"));
        }
    }

    /// Labels and annotations, whose keys are not formatted like field names.
    fn map(&mut self, depth: usize, key: &str, map: &Value) {
        let mut pairs = map.as_object().into_iter().flatten().peekable();
        if pairs.peek().is_none() {
            return self.field(depth, key, "none");
        }
        self.0.push_str(&format!("{}{key}:\n", "  ".repeat(depth)));
        for (name, value) in pairs {
            self.field(depth + 1, name, value.as_str().unwrap_or(""));
        }
    }

    fn value(&mut self, depth: usize, key: &str, value: &Value) {
        let indent = "  ".repeat(depth);
        match value {
            Value::Object(map) if map.is_empty() => self.field(depth, key, "none"),
            Value::Object(map) => {
                self.0.push_str(&format!("{indent}{key}:\n"));
                for (inner, value) in map {
                    self.value(depth + 1, &title(inner), value);
                }
            }
            Value::Array(items) if items.is_empty() => self.field(depth, key, "none"),
            Value::Array(items) if items.iter().all(|item| !item.is_object() && !item.is_array()) => {
                self.field(depth, key, &items.iter().map(plain).collect::<Vec<_>>().join(", "));
            }
            Value::Array(items) => {
                self.0.push_str(&format!("{indent}{key}:\n"));
                for (at, item) in items.iter().enumerate() {
                    self.item(depth + 1, at, item);
                }
            }
            _ => self.field(depth, key, &plain(value)),
        }
    }

    /// A list item is titled by its name, type or path.
    fn item(&mut self, depth: usize, at: usize, item: &Value) {
        let name = ["name", "type"].iter().find_map(|field| item[*field].as_str());
        let key = name.map_or_else(|| format!("[{at}]"), str::to_owned);
        match (name, item.as_object()) {
            (Some(_), Some(fields)) => {
                self.0.push_str(&format!("{}{key}:\n", "  ".repeat(depth)));
                for (inner, value) in fields.iter().filter(|(inner, _)| *inner != "name" && *inner != "type")
                {
                    self.value(depth + 1, &title(inner), value);
                }
            }
            _ => self.value(depth, &key, item),
        }
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn titles() {
        for (field, expected) in [
            ("url", "Url"),
            ("latestReadyRevision", "Latest Ready Revision"),
            ("podIPs", "Pod IPs"),
            ("", ""),
        ] {
            assert_eq!(title(field), expected);
        }
    }

    #[test]
    fn a_function_reads_well() {
        let object = json!({
            "apiVersion": "mayfly.dev/v1", "kind": "Function",
            "metadata": {"name": "hello", "namespace": "default", "creationTimestamp": "2026-01-02T00:00:00Z",
                         "labels": {"team.example.com/name": "a"}},
            "spec": {"env": [{"name": "GREETING", "value": "hi"}], "egress": ["https://a", "https://b"],
                     "traffic": [{"latest": true, "percent": 100}]},
            "status": {"readyReplicas": 1, "conditions": [
                {"type": "Ready", "status": "True", "reason": "Ready", "message": "all is well",
                 "lastTransitionTime": "2026-01-02T00:00:05Z"}]}
        });
        let events = [json!({"type": "Normal", "reason": "RevisionCreated", "message": "made hello-00001",
            "count": 2, "lastTimestamp": "2026-01-02T00:00:01Z", "source": {"component": "function-controller"}})];
        let now = "2026-01-02T00:00:30Z".parse().unwrap();
        let expected = "\
Name:  hello
Namespace:  default
Kind:  Function (mayfly.dev/v1)
Created:  2026-01-02T00:00:00Z (30s ago)
Labels:
  team.example.com/name:  a
Annotations:  none
Spec:
  Egress:  https://a, https://b
  Env:
    GREETING:
      Value:  hi
  Traffic:
    [0]:
      Latest:  true
      Percent:  100
Status:
  Ready Replicas:  1
Conditions:
  TYPE    STATUS   SINCE   REASON   MESSAGE
  Ready   True     25s     Ready    all is well
Events:
  LAST SEEN   TYPE     REASON            FROM                  MESSAGE
  29s (x2)    Normal   RevisionCreated   function-controller   made hello-00001
";
        assert_eq!(text(&object, &events, now), expected);
    }

    #[test]
    fn a_secret_keeps_its_values() {
        let object = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
                            "data": {"password": "aHVudGVyMg=="}});
        let text = text(&object, &[], Timestamp::UNIX_EPOCH);
        assert!(text.contains("7 B") && !text.contains("aHVudGVyMg"), "{text}");
    }
}
