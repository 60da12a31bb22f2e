//! Amazon resource names of the `states` service: their parts, AWS's checks of them with AWS's messages, and a type for
//! each kind of resource that the engine, the journal and the API name.
//!
//! A request's text becomes one of these types once, by `parse`. Text that was checked before (a journal's row, an ARN
//! built from checked parts) becomes one by `from_trusted`. Clones share the text.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Reasons for which a text is not an ARN that an operation accepts; displayed as AWS's inner sentence of `InvalidArn`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArnRejection {
    /// The text does not begin with `arn:`.
    #[error("Invalid ARN prefix: {0}")]
    Prefix(String),
    /// The text has too few, too many or empty fields.
    #[error("ARN is not valid: {0}")]
    Fields(String),
    /// The ARN is another service's.
    #[error("Service name is invalid: {0}")]
    Service(String),
    /// The service has no resources of this type.
    #[error("Invalid resource type: {0}")]
    UnknownType(String),
    /// The operation does not accept resources of this type.
    #[error("Resource type not valid in this context: {0}")]
    WrongType(String),
}

/// An ARN of the `states` service, split into its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArnParts<'a> {
    /// The whole text.
    pub text: &'a str,
    /// `stateMachine`, `execution`, `express`, `activity` or `mapRun`.
    pub resource: &'a str,
    /// The fields after the resource type, split at colons; never empty.
    pub fields: Vec<&'a str>,
    /// `arn:<partition>:states:<region>:<account>`.
    pub prefix: &'a str,
}

impl<'a> ArnParts<'a> {
    /// Splits an ARN of the `states` service.
    pub fn parse(text: &'a str) -> Result<ArnParts<'a>, ArnRejection> {
        if !text.starts_with("arn:") {
            return Err(ArnRejection::Prefix(text.to_owned()));
        }
        let fields: Vec<&str> = text.split(':').collect();
        if fields.len() < 7 || fields[1..].iter().any(|field| field.is_empty()) {
            return Err(ArnRejection::Fields(text.to_owned()));
        }
        if fields[2] != "states" {
            return Err(ArnRejection::Service(fields[2].to_owned()));
        }
        let prefix_len = fields[..5].iter().map(|field| field.len() + 1).sum::<usize>() - 1;
        let parts =
            ArnParts { text, resource: fields[5], fields: fields[6..].to_vec(), prefix: &text[..prefix_len] };
        let fields_max = match parts.resource {
            "activity" => 1,
            "stateMachine" | "execution" => 2,
            "express" | "mapRun" => 3,
            other => return Err(ArnRejection::UnknownType(other.to_owned())),
        };
        if parts.fields.len() > fields_max {
            return Err(ArnRejection::Fields(text.to_owned()));
        }
        Ok(parts)
    }

    /// Splits an ARN whose resource type has to be one of `resources`.
    pub fn of(text: &'a str, resources: &[&str]) -> Result<ArnParts<'a>, ArnRejection> {
        let parts = ArnParts::parse(text)?;
        match resources.contains(&parts.resource) {
            true => Ok(parts),
            false => Err(ArnRejection::WrongType(parts.resource.to_owned())),
        }
    }
}

macro_rules! arn {
    ($(#[$about:meta])* $name:ident, $resource:literal) => {
        $(#[$about])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            #[doc = concat!("Checks an ARN of the resource type `", $resource, "`, as AWS does.")]
            pub fn parse(text: &str) -> Result<Self, ArnRejection> {
                ArnParts::of(text, &[$resource]).map(|parts| Self(parts.text.into()))
            }

            /// An ARN that was checked before: one from a store, or one that was built from checked parts.
            pub fn from_trusted(text: impl Into<Arc<str>>) -> Self {
                Self(text.into())
            }

            /// The ARN's text.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// The field after the last colon.
            pub fn last_field(&self) -> &str {
                self.0.rsplit(':').next().unwrap_or_default()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        /// Maps with these keys are searched by text.
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl From<$name> for Arc<str> {
            fn from(arn: $name) -> Arc<str> {
                arn.0
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                &*self.0 == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                &*self.0 == *other
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer).map(|text| Self(text.into()))
            }
        }
    };
}

arn! {
    /// The ARN of an execution. `parse` accepts `…:execution:<machine>:<name>` only: an EXPRESS execution
    /// (`…:express:<machine>:<name>:<id>`) cannot be named in a request.
    ExecutionArn, "execution"
}
arn! {
    /// The ARN of a state machine, `…:stateMachine:<name>`, or of one of its versions or aliases, which have a qualifier
    /// behind it: `…:stateMachine:<name>:<qualifier>`.
    StateMachineArn, "stateMachine"
}
arn! {
    /// The ARN of an activity, `…:activity:<name>`.
    ActivityArn, "activity"
}
arn! {
    /// The ARN of a map run, `…:mapRun:<machine>/<label>:<id>`.
    MapRunArn, "mapRun"
}

/// The ARN of a resource that can have tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaggedArn {
    /// A state machine's; that of a version or an alias is well formed, but neither has tags.
    StateMachine(StateMachineArn),
    /// An activity's.
    Activity(ActivityArn),
}

impl TaggedArn {
    /// Checks an ARN of the resource types `stateMachine` and `activity`, as AWS does.
    pub fn parse(text: &str) -> Result<Self, ArnRejection> {
        let parts = ArnParts::of(text, &["stateMachine", "activity"])?;
        Ok(match parts.resource {
            "activity" => Self::Activity(ActivityArn(text.into())),
            _ => Self::StateMachine(StateMachineArn(text.into())),
        })
    }
}

impl From<StateMachineArn> for TaggedArn {
    fn from(arn: StateMachineArn) -> Self {
        Self::StateMachine(arn)
    }
}

impl From<ActivityArn> for TaggedArn {
    fn from(arn: ActivityArn) -> Self {
        Self::Activity(arn)
    }
}

impl fmt::Display for TaggedArn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StateMachine(arn) => arn.fmt(f),
            Self::Activity(arn) => arn.fmt(f),
        }
    }
}

/// The qualifier in a state machine's ARN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArnQualifier<'a> {
    /// The number of a published version.
    Version(u64),
    /// The name of an alias.
    Alias(&'a str),
}

impl StateMachineArn {
    /// The fields after `stateMachine:`; the whole text where a trusted ARN has no such field.
    fn own_fields(&self) -> &str {
        self.0.split_once(":stateMachine:").map_or(&*self.0, |(_, fields)| fields)
    }

    /// `arn:<partition>:states:<region>:<account>`, with which the ARNs of the state machine's executions and map runs
    /// begin, too. `None` for a trusted text that is of another form.
    pub fn prefix(&self) -> Option<&str> {
        self.0.split_once(":stateMachine:").map(|(prefix, _)| prefix)
    }

    /// The state machine's name: `<machine>/<label>` for that of a Distributed Map state.
    pub fn name(&self) -> &str {
        self.own_fields().split(':').next().unwrap_or_default()
    }

    /// The version or alias that the ARN names, if it has a qualifier.
    pub fn qualifier(&self) -> Option<ArnQualifier<'_>> {
        let (_, qualifier) = self.own_fields().split_once(':')?;
        Some(match qualifier.parse() {
            Ok(number) => ArnQualifier::Version(number),
            Err(_) => ArnQualifier::Alias(qualifier),
        })
    }

    /// The ARN without its qualifier.
    pub fn unqualified(&self) -> StateMachineArn {
        match self.own_fields().split_once(':') {
            Some((_, qualifier)) => Self(self.0[..self.0.len() - qualifier.len() - 1].into()),
            None => self.clone(),
        }
    }

    /// The ARN of the state machine that has the Map state of this one, `…:stateMachine:<machine>/<label>`; of any other
    /// one, the ARN itself.
    pub fn without_label(&self) -> StateMachineArn {
        match self.0.split_once('/') {
            Some((machine, _)) => Self(machine.into()),
            None => self.clone(),
        }
    }

    /// The ARN of a version or an alias of this state machine, which must have no qualifier itself.
    pub fn qualified(&self, qualifier: impl fmt::Display) -> StateMachineArn {
        Self(format!("{self}:{qualifier}").into())
    }
}

impl MapRunArn {
    /// The label of the Map state.
    pub fn label(&self) -> Option<&str> {
        let (_, label) = self.0.split_once(":mapRun:")?.1.split(':').next()?.split_once('/')?;
        Some(label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: &str = "arn:aws:states:us-east-1:000000000000:stateMachine:orders";

    #[test]
    fn the_qualifier_of_a_state_machine_can_be_taken_off_and_put_on() {
        let machine = StateMachineArn::parse(MACHINE).expect("an ARN");
        assert_eq!((machine.name(), machine.qualifier()), ("orders", None));
        assert_eq!(machine.prefix(), Some("arn:aws:states:us-east-1:000000000000"));
        assert_eq!(StateMachineArn::from_trusted("orders").prefix(), None);
        assert_eq!(machine.unqualified(), machine);
        let version = machine.qualified(7);
        assert_eq!(StateMachineArn::parse(version.as_str()).as_ref(), Ok(&version));
        assert_eq!((version.name(), version.qualifier()), ("orders", Some(ArnQualifier::Version(7))));
        assert_eq!(version.unqualified(), machine);
        assert_eq!(machine.qualified("live").qualifier(), Some(ArnQualifier::Alias("live")));
        let of_map = StateMachineArn::from_trusted(format!("{MACHINE}/label"));
        assert_eq!((of_map.name(), of_map.without_label()), ("orders/label", machine.clone()));
        assert_eq!(machine.without_label(), machine);
    }

    #[test]
    fn parts_of_an_arn() {
        let text = "arn:aws-cn:states:cn-north-1:000000000000:mapRun:machine/label:6e0c";
        let parts = ArnParts::of(text, &["mapRun"]).expect("an ARN");
        assert_eq!(parts.prefix, "arn:aws-cn:states:cn-north-1:000000000000");
        assert_eq!((parts.resource, &*parts.fields), ("mapRun", &["machine/label", "6e0c"][..]));
        let run = MapRunArn::parse(text).expect("an ARN");
        assert_eq!((run.label(), run.last_field()), (Some("label"), "6e0c"));
    }

    #[test]
    fn texts_that_are_no_arns_are_rejected_in_the_words_of_aws() {
        for (text, reason) in [
            ("nonsense", "Invalid ARN prefix: nonsense"),
            (
                "arn:aws:states:us-east-1::execution:a:b",
                "ARN is not valid: arn:aws:states:us-east-1::execution:a:b",
            ),
            ("arn:aws:states:r:1:execution:a:b:c", "ARN is not valid: arn:aws:states:r:1:execution:a:b:c"),
            ("arn:aws:sqs:r:1:execution:a", "Service name is invalid: sqs"),
            ("arn:aws:states:r:1:queue:a", "Invalid resource type: queue"),
            ("arn:aws:states:r:1:express:a:b:c", "Resource type not valid in this context: express"),
            (MACHINE, "Resource type not valid in this context: stateMachine"),
        ] {
            assert_eq!(ExecutionArn::parse(text).expect_err(text).to_string(), reason);
        }
    }

    #[test]
    fn state_machines_and_activities_have_tags() {
        let activity = "arn:aws:states:us-east-1:000000000000:activity:ship";
        assert_eq!(TaggedArn::parse(MACHINE), Ok(StateMachineArn::from_trusted(MACHINE).into()));
        assert_eq!(TaggedArn::parse(activity), Ok(ActivityArn::from_trusted(activity).into()));
        let run = TaggedArn::parse("arn:aws:states:r:1:mapRun:m/l:i").expect_err("a map run has no tags");
        assert_eq!(run.to_string(), "Resource type not valid in this context: mapRun");
    }

    #[test]
    fn an_arn_is_stored_as_its_text() {
        let machine = StateMachineArn::parse(MACHINE).expect("an ARN");
        let text = serde_json::to_string(&machine).expect("JSON");
        assert_eq!(text, format!("\"{MACHINE}\""));
        assert_eq!(serde_json::from_str::<StateMachineArn>(&text).expect("an ARN"), machine);
    }
}
