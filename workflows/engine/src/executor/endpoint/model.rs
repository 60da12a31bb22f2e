//! The inputs and outputs of operations of services with XML protocols: S3 and SNS. Source: their public service
//! models, reduced to these operations.

use std::sync::LazyLock;

use indexmap::IndexMap;
use mayfly_workflows_language::value::{Map, Value};
use serde::Deserialize;

/// A service's operations by name.
pub(super) type Model = IndexMap<String, Operation>;
/// The members of a structure, as the model names them.
pub(super) type Members = IndexMap<String, MemberShape>;

pub(super) static S3: LazyLock<Model> = LazyLock::new(|| read(include_str!("s3.json")));
pub(super) static SNS: LazyLock<Model> = LazyLock::new(|| read(include_str!("sns.json")));

/// One operation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Operation {
    #[serde(default)]
    pub(super) method: String,
    /// A path with `{Bucket}` and `{Key+}` in it, maybe with a query.
    #[serde(default)]
    pub(super) uri: String,
    /// The body goes with its checksum.
    #[serde(default)]
    pub(super) checksum: bool,
    #[serde(default)]
    pub(super) required: Vec<String>,
    pub(super) input: Members,
    /// The element around the answer.
    pub(super) wrapper: Option<String>,
    #[serde(default)]
    pub(super) output: Members,
}

/// A member's type and its location in the request or response.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemberShape {
    #[serde(rename = "type", default)]
    pub(super) kind: ShapeType,
    #[serde(rename = "in")]
    pub(super) place: Option<MemberLocation>,
    /// On the wire, where that is not the member's name.
    name: Option<String>,
    #[serde(default)]
    pub(super) flattened: bool,
    pub(super) format: Option<Format>,
    #[serde(default)]
    pub(super) members: Members,
    pub(super) item: Option<Box<MemberShape>>,
    pub(super) key: Option<Box<MemberShape>>,
    pub(super) value: Option<Box<MemberShape>>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ShapeType {
    #[default]
    String,
    Blob,
    Boolean,
    Integer,
    List,
    Map,
    Structure,
    Timestamp,
}

/// The location of a member that is not an element of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum MemberLocation {
    Attribute,
    Header,
    /// All headers that begin with the name.
    Headers,
    /// It is the body.
    Payload,
    QueryString,
    Uri,
}

/// The format of a time, if it differs from the default of its location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Format {
    Rfc822,
    Iso8601,
}

impl MemberShape {
    /// The name on the wire of the member `member`.
    pub(super) fn wire_name<'a>(&'a self, member: &'a str) -> &'a str {
        self.name.as_deref().unwrap_or(member)
    }
}

/// The models are part of the program, and a test reads them.
fn read(text: &str) -> Model {
    serde_json::from_str(text).expect("a service's model")
}

/// A task's argument. Workflows spell members as the SDK for Java does (`SsekmsKeyId` for `SSEKMSKeyId`).
pub(super) fn argument<'a>(arguments: &'a Map, member: &str) -> Option<&'a Value> {
    let found = arguments.get(member);
    let found = found.or_else(|| {
        let mut all = arguments.iter();
        all.find(|(name, _)| name.eq_ignore_ascii_case(member)).map(|(_, value)| value)
    });
    found.filter(|value| !value.is_null())
}

/// Reports missing and unknown arguments of an operation.
pub(super) fn check(operation: &Operation, arguments: &Map) -> Result<(), String> {
    for name in &operation.required {
        if argument(arguments, name).is_none() {
            return Err(format!("The field '{name}' is required but was missing"));
        }
    }
    let known = |name: &str| operation.input.keys().any(|member| member.eq_ignore_ascii_case(name));
    match arguments.keys().find(|name| !known(name)) {
        Some(name) => Err(format!("The field '{name}' is not supported by Step Functions")),
        None => Ok(()),
    }
}

/// A member in the spelling of the SDK for Java: a run of capitals is one word.
pub(super) fn sdk_spelling(member: &str) -> String {
    let letters: Vec<char> = member.chars().collect();
    let mut told = String::with_capacity(member.len());
    let mut at = 1;
    told.extend(letters.first());
    let upper = |at: usize| letters.get(at).is_some_and(|letter: &char| letter.is_ascii_uppercase());
    let lower = |at: usize| letters.get(at).is_some_and(|letter: &char| letter.is_ascii_lowercase());
    while upper(at) && !lower(at + 1) {
        told.push(letters[at].to_ascii_lowercase());
        at += 1;
    }
    told.extend(&letters[at.min(letters.len())..]);
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_can_be_read() {
        assert_eq!(S3["GetObject"].method, "GET");
        assert_eq!(S3["GetObject"].output["Body"].place, Some(MemberLocation::Payload));
        assert_eq!(SNS["Publish"].wrapper.as_deref(), Some("PublishResult"));
    }

    #[test]
    fn members_are_spelled_as_the_sdk_for_java_spells_them() {
        for (member, expected) in [
            ("ETag", "ETag"),
            ("SSEKMSKeyId", "SsekmsKeyId"),
            ("SSECustomerKeyMD5", "SseCustomerKeyMD5"),
            ("ChecksumCRC32", "ChecksumCRC32"),
            ("MFADelete", "MfaDelete"),
            ("ID", "Id"),
            ("ACL", "Acl"),
            ("MD5OfMessageBody", "Md5OfMessageBody"),
            ("Key", "Key"),
        ] {
            assert_eq!(sdk_spelling(member), expected);
        }
    }

    #[test]
    fn arguments_are_looked_at_before_anything_is_sent() {
        let told = |text: &str| {
            let arguments = Value::parse(text).expect("JSON");
            check(&S3["GetObject"], arguments.as_object().expect("an object"))
        };
        assert_eq!(told(r#"{"Bucket":"b","Key":"k","SseCustomerKey":"x"}"#), Ok(()));
        assert!(told(r#"{"Bucket":"b"}"#).expect_err("no key").contains("'Key' is required"));
        assert!(told(r#"{"Bucket":"b","Key":"k","Kee":1}"#).expect_err("a typo").contains("'Kee'"));
    }
}
