//! The members that the SDK adds to a response of an AWS service: request id and headers.

use super::ids::EffectId;
use std::cmp::Ordering;
use std::sync::{Arc, LazyLock};

use mayfly_workflows_language::execution::{Digest, uuid_of};
use mayfly_workflows_language::value::{Map, Value};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

/// The version of a function without versions.
pub const LATEST: &str = "$LATEST";
const EXECUTED_VERSION: &str = "X-Amz-Executed-Version";
const TRACE_ID: &str = "X-Amzn-Trace-Id";
const REQUEST_ID: &str = "x-amzn-RequestId";
const LENGTH: &str = "Content-Length";
const DATE: &str = "Date";

/// The inputs of the metadata of a response with a body of `bytes` bytes.
#[derive(Debug)]
pub struct Envelope<'a> {
    pub request_id: &'a str,
    pub bytes: usize,
    pub at_ms: i64,
    pub content_type: &'a str,
    /// Additional headers of this service: name, value.
    pub extra: &'a [(&'a str, &'a str)],
}

impl Envelope<'_> {
    /// `SdkHttpMetadata` and `SdkResponseMetadata`.
    pub fn members(&self) -> [(&'static str, Value); 2] {
        let (all, plain) = self.headers();
        let metadata = Value::object([
            ("AllHttpHeaders", Value::from(all)),
            ("HttpHeaders", Value::from(plain)),
            ("HttpStatusCode", Value::from(200_i64)),
        ]);
        let response = Value::object([("RequestId", Value::from(self.request_id))]);
        [("SdkHttpMetadata", metadata), ("SdkResponseMetadata", response)]
    }

    /// The headers as lists in the order of the response, and as strings in alphabetical order.
    fn headers(&self) -> (Map, Map) {
        let (date, length) = (http_date(self.at_ms), self.bytes.to_string());
        let shared = |(name, value): (&str, &str)| (Arc::<str>::from(name), Value::from(value));
        let mut headers: Vec<(Arc<str>, Value)> = Vec::with_capacity(self.extra.len() + 5);
        headers.extend(self.extra.iter().copied().map(shared));
        headers.extend(
            [
                (REQUEST_ID, self.request_id),
                ("connection", "keep-alive"),
                (LENGTH, &*length),
                (DATE, &*date),
                ("Content-Type", self.content_type),
            ]
            .map(shared),
        );
        let mut all = Map::with_capacity(headers.len());
        for (name, value) in &headers {
            all.insert(name.clone(), Value::from(vec![value.clone()]));
        }
        // `HttpHeaders` is a case-insensitive sorted map (test-start-execution-sync).
        headers.sort_by(|(a, _), (b, _)| without_case(a, b));
        (all, headers.into_iter().collect())
    }
}

/// The result of `lambda:invoke` for a function's response `text`, which is JSON or a plain string.
///
/// `version` is empty if nothing was executed yet (`InvocationType: Event`): then the result has no version, and
/// `status` is that of the response. (Records of an earlier version of Mayfly always have a version and the status
/// 200.)
///
/// Many steps of a workflow create such a result, so the constant parts are built once and shared.
pub fn of_function(text: &str, status: u16, version: &str, at_ms: i64, request_id: Uuid) -> Value {
    static COMMON: LazyLock<Common> = LazyLock::new(Common::new);
    let common = &*COMMON;
    let payload = Value::parse(text).unwrap_or_else(|_| Value::from(text));
    let (mut all, mut plain) = (common.all.clone(), common.plain.clone());
    let mut set = |name: &str, value: &Value| {
        if let (Some(all), Some(plain)) = (all.get_mut(name), plain.get_mut(name)) {
            *all = Value::from(vec![value.clone()]);
            *plain = value.clone();
        }
    };
    let mut trace = String::with_capacity(39);
    trace.push_str("root=1-");
    trace.push_str(request_id.simple().encode_lower(&mut Uuid::encode_buffer()));
    let request_id = Value::from(&*request_id.hyphenated().encode_lower(&mut Uuid::encode_buffer()));
    set(TRACE_ID, &Value::from(trace));
    set(REQUEST_ID, &request_id);
    set(LENGTH, &Value::from(text.len().to_string()));
    set(DATE, &Value::from(http_date(at_ms)));
    let http_status = if version.is_empty() { status } else { 200 };
    let mut executed = common.version.clone();
    if !version.is_empty() && version != LATEST {
        executed = Value::from(version);
        set(EXECUTED_VERSION, &executed);
    }
    if version.is_empty() {
        all.remove(EXECUTED_VERSION);
        plain.remove(EXECUTED_VERSION);
    }
    let [version_name, payload_name, metadata_name, response_name, status_name] = &common.members;
    let [all_name, plain_name, http_status_name] = &common.metadata;
    let metadata = Value::object([
        (all_name.clone(), Value::from(all)),
        (plain_name.clone(), Value::from(plain)),
        (http_status_name.clone(), Value::from(u64::from(http_status))),
    ]);
    let version = (!version.is_empty()).then(|| (version_name.clone(), executed));
    Value::object(version.into_iter().chain([
        (payload_name.clone(), payload),
        (metadata_name.clone(), metadata),
        (response_name.clone(), Value::object([(common.request_id.clone(), request_id)])),
        (status_name.clone(), Value::from(u64::from(status))),
    ]))
}

/// The constant parts of all functions' results, and the positions of the other parts.
struct Common {
    all: Map,
    plain: Map,
    version: Value,
    members: [Arc<str>; 5],
    metadata: [Arc<str>; 3],
    request_id: Arc<str>,
}

impl Common {
    fn new() -> Self {
        let envelope = Envelope {
            request_id: "",
            bytes: 0,
            at_ms: 0,
            content_type: "application/json",
            extra: &[(EXECUTED_VERSION, LATEST), ("x-amzn-Remapped-Content-Length", "0"), (TRACE_ID, "")],
        };
        let (all, plain) = envelope.headers();
        Self {
            all,
            plain,
            version: Value::from(LATEST),
            members: ["ExecutedVersion", "Payload", "SdkHttpMetadata", "SdkResponseMetadata", "StatusCode"]
                .map(Into::into),
            metadata: ["AllHttpHeaders", "HttpHeaders", "HttpStatusCode"].map(Into::into),
            request_id: "RequestId".into(),
        }
    }
}

/// The request id of an effect: derived from the execution's seed, and equal in every replay.
pub(super) fn request_id(seed: &[u8; 16], effect: EffectId) -> Uuid {
    let mut hash = Sha256::new();
    hash.update(b"mayfly request");
    hash.update(seed);
    hash.update(effect.0.to_be_bytes());
    uuid_of(&Digest::from_bytes(hash.finalize().into()))
}

fn without_case(a: &str, b: &str) -> Ordering {
    let small = |byte: u8| byte.to_ascii_lowercase();
    a.bytes().map(small).cmp(b.bytes().map(small))
}

/// `Tue, 14 Nov 2023 22:13:20 GMT`.
fn http_date(at_ms: i64) -> String {
    let Ok(at) = jiff::Timestamp::from_millisecond(at_ms) else { return at_ms.to_string() };
    let at = at.to_zoned(jiff::tz::TimeZone::UTC);
    let days = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    let months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let of = |names: &[&'static str], at: i8| usize::try_from(at).ok().and_then(|at| names.get(at).copied());
    let day = of(&days, at.weekday().to_sunday_zero_offset()).unwrap_or_default();
    let month = of(&months, at.month() - 1).unwrap_or_default();
    let (hour, minute, second) = (at.hour(), at.minute(), at.second());
    format!("{day}, {:02} {month} {:04} {hour:02}:{minute:02}:{second:02} GMT", at.day(), at.year())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn dates_are_http_dates() {
        assert_eq!(http_date(1_700_000_000_000), "Tue, 14 Nov 2023 22:13:20 GMT");
    }

    #[test]
    fn a_functions_answer_stands_in_its_envelope() {
        let id = Uuid::from_u128(0x9d8f_0000_0000_0000_0000_0000_0000_0001);
        let told = of_function(r#"{"a":1}"#, 200, LATEST, 1_700_000_000_000, id);
        assert_eq!(
            told.to_text(),
            concat!(
                r#"{"ExecutedVersion":"$LATEST","Payload":{"a":1},"SdkHttpMetadata":{"AllHttpHeaders":{"#,
                r#""X-Amz-Executed-Version":["$LATEST"],"x-amzn-Remapped-Content-Length":["0"],"#,
                r#""X-Amzn-Trace-Id":["root=1-9d8f0000000000000000000000000001"],"x-amzn-RequestId":["9d8f0000-0000-0000-0000-000000000001"],"#,
                r#""connection":["keep-alive"],"Content-Length":["7"],"#,
                r#""Date":["Tue, 14 Nov 2023 22:13:20 GMT"],"Content-Type":["application/json"]},"#,
                r#""HttpHeaders":{"connection":"keep-alive","Content-Length":"7","#,
                r#""Content-Type":"application/json","Date":"Tue, 14 Nov 2023 22:13:20 GMT","#,
                r#""X-Amz-Executed-Version":"$LATEST","x-amzn-Remapped-Content-Length":"0","#,
                r#""x-amzn-RequestId":"9d8f0000-0000-0000-0000-000000000001","X-Amzn-Trace-Id":"root=1-9d8f0000000000000000000000000001"},"HttpStatusCode":200},"#,
                r#""SdkResponseMetadata":{"RequestId":"9d8f0000-0000-0000-0000-000000000001"},"StatusCode":200}"#,
            )
        );
        let text = of_function("no JSON", 202, "7", 0, id);
        assert_eq!(text.get("Payload"), Some(&Value::from("no JSON")));
        assert_eq!(
            (text.get("StatusCode"), text.get("ExecutedVersion")),
            (Some(&Value::from(202_i64)), Some(&Value::from("7")))
        );
    }

    #[test]
    fn an_accepted_event_names_no_version() {
        let id = Uuid::from_u128(1);
        let told = of_function("null", 202, "", 0, id).to_serde();
        let metadata = &told["SdkHttpMetadata"];
        assert_eq!((&told["StatusCode"], &metadata["HttpStatusCode"]), (&json!(202), &json!(202)));
        assert_eq!(told.get("ExecutedVersion"), None);
        for headers in ["AllHttpHeaders", "HttpHeaders"] {
            assert_eq!(metadata[headers].get(EXECUTED_VERSION), None);
            assert!(metadata[headers].get(TRACE_ID).is_some());
        }
        // Records of an earlier version have the same result as before.
        let before = of_function("null", 202, LATEST, 0, id).to_serde();
        assert_eq!(
            (&before["SdkHttpMetadata"]["HttpStatusCode"], &before["ExecutedVersion"]),
            (&json!(200), &json!(LATEST))
        );
    }

    #[test]
    fn a_requests_number_is_its_effects_own() {
        assert_eq!(request_id(&[1; 16], EffectId(3)), request_id(&[1; 16], EffectId(3)));
        assert_ne!(request_id(&[1; 16], EffectId(3)), request_id(&[1; 16], EffectId(4)));
        assert_ne!(request_id(&[1; 16], EffectId(3)), request_id(&[2; 16], EffectId(3)));
    }
}
