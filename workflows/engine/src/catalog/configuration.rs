//! The logging, tracing and encryption configurations of state machines and activities.
//!
//! Their serialised form is that of the API, in the catalog too. Defaults are filled in when a value is made, so that a
//! configuration is returned as AWS returns it.

use serde::{Deserialize, Serialize};

/// Reasons for which a configuration is rejected; displayed as AWS's sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigurationRejection {
    /// A level other than `OFF` without a log group, more than one destination, or one that names no log group.
    #[error("Must specify exactly one Log Destination.")]
    LogDestinations,
    /// A key of the caller's own without its id.
    #[error("kmsKeyId is required when type is CUSTOMER_MANAGED_KMS_KEY")]
    KeyMissing,
    /// The id of a key where AWS's own key is used.
    #[error("kmsKeyId must not be set when type is AWS_OWNED_KEY")]
    KeyUnexpected,
}

/// The events of executions that are logged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum LogLevel {
    /// All events.
    All,
    /// Events of errors.
    Error,
    /// Events that end an execution with an error.
    Fatal,
    /// No events.
    #[default]
    Off,
}

impl LogLevel {
    /// The level with this name in the API.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "ALL" => LogLevel::All,
            "ERROR" => LogLevel::Error,
            "FATAL" => LogLevel::Fatal,
            "OFF" => LogLevel::Off,
            _ => return None,
        })
    }
}

/// A destination of logs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogDestination {
    /// The only kind of destination.
    pub cloud_watch_logs_log_group: LogGroup,
}

/// A group of logs in CloudWatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogGroup {
    /// The group's ARN, as it was sent.
    pub log_group_arn: String,
}

/// The logging of a state machine's executions. Stored and returned; Mayfly writes no logs to CloudWatch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoggingConfiguration {
    /// At most one destination.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    destinations: Vec<LogDestination>,
    #[serde(default)]
    include_execution_data: bool,
    #[serde(default)]
    level: LogLevel,
}

impl LoggingConfiguration {
    /// A configuration with these destinations, each the ARN of its log group or `None` for a destination that names no
    /// group.
    ///
    /// # Errors
    /// [`ConfigurationRejection::LogDestinations`].
    pub fn new(
        level: LogLevel,
        include_execution_data: bool,
        log_groups: Vec<Option<String>>,
    ) -> Result<Self, ConfigurationRejection> {
        if log_groups.len() > 1 || (log_groups.is_empty() && level != LogLevel::Off) {
            return Err(ConfigurationRejection::LogDestinations);
        }
        let destination = |log_group: Option<String>| match log_group {
            Some(log_group_arn) => {
                Ok(LogDestination { cloud_watch_logs_log_group: LogGroup { log_group_arn } })
            }
            None => Err(ConfigurationRejection::LogDestinations),
        };
        let destinations = log_groups.into_iter().map(destination).collect::<Result<_, _>>()?;
        Ok(Self { destinations, include_execution_data, level })
    }
}

/// The tracing of a state machine's executions with X-Ray. Stored and returned; Mayfly sends no traces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracingConfiguration {
    /// Whether executions are traced.
    #[serde(default)]
    pub enabled: bool,
}

/// The key with which the data of a state machine or an activity is encrypted. Stored and returned; Mayfly encrypts no
/// data with it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum EncryptionConfiguration {
    /// A key of AWS's own.
    #[default]
    #[serde(rename = "AWS_OWNED_KEY")]
    AwsOwnedKey,
    /// A key of the caller's account.
    #[serde(rename = "CUSTOMER_MANAGED_KMS_KEY", rename_all = "camelCase")]
    CustomerManagedKmsKey {
        /// The key's id, alias or ARN, as it was sent.
        kms_key_id: String,
        /// The time for which a data key is used, in seconds.
        kms_data_key_reuse_period_seconds: u64,
    },
}

/// AWS's `kmsDataKeyReusePeriodSeconds` for a request that names none.
const REUSE_SECONDS_DEFAULT: u64 = 300;

impl EncryptionConfiguration {
    /// A key of the caller's account; the reuse of a data key is AWS's default without `reuse_seconds`.
    ///
    /// # Errors
    /// [`ConfigurationRejection::KeyMissing`].
    pub fn customer_managed(
        key_id: Option<String>,
        reuse_seconds: Option<u64>,
    ) -> Result<Self, ConfigurationRejection> {
        Ok(Self::CustomerManagedKmsKey {
            kms_key_id: key_id.ok_or(ConfigurationRejection::KeyMissing)?,
            kms_data_key_reuse_period_seconds: reuse_seconds.unwrap_or(REUSE_SECONDS_DEFAULT),
        })
    }

    /// A key of AWS's own, for which a request must name no key.
    ///
    /// # Errors
    /// [`ConfigurationRejection::KeyUnexpected`].
    pub fn aws_owned(key_id: Option<&str>) -> Result<Self, ConfigurationRejection> {
        match key_id {
            Some(_) => Err(ConfigurationRejection::KeyUnexpected),
            None => Ok(Self::AwsOwnedKey),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    /// Reads a configuration as AWS returns it, and checks that it is written in the same form.
    fn round_trip<T: Serialize + DeserializeOwned>(wire: &Value) -> T {
        let read: T = serde_json::from_value(wire.clone()).expect("AWS's form");
        assert_eq!(&serde_json::to_value(&read).expect("JSON"), wire);
        read
    }

    #[test]
    fn configurations_are_written_as_aws_returns_them() {
        let off = json!({"level": "OFF", "includeExecutionData": false});
        assert_eq!(round_trip::<LoggingConfiguration>(&off), LoggingConfiguration::default());
        let group = "arn:aws:logs:us-east-1:111111111111:log-group:g:*";
        for level in ["ALL", "ERROR", "FATAL", "OFF"] {
            let wire = json!({
                "level": level,
                "includeExecutionData": true,
                "destinations": [{"cloudWatchLogsLogGroup": {"logGroupArn": group}}],
            });
            let made = LoggingConfiguration::new(
                LogLevel::parse(level).expect("a level"),
                true,
                vec![Some(group.to_owned())],
            );
            assert_eq!(Ok(round_trip::<LoggingConfiguration>(&wire)), made);
        }
        for enabled in [true, false] {
            let tracing: TracingConfiguration = round_trip(&json!({"enabled": enabled}));
            assert_eq!(tracing.enabled, enabled);
        }
        let own: EncryptionConfiguration = round_trip(&json!({"type": "AWS_OWNED_KEY"}));
        assert_eq!(Ok(own), EncryptionConfiguration::aws_owned(None));
        let key = json!({
            "type": "CUSTOMER_MANAGED_KMS_KEY", "kmsKeyId": "alias/k", "kmsDataKeyReusePeriodSeconds": 300,
        });
        let made = EncryptionConfiguration::customer_managed(Some("alias/k".to_owned()), None);
        assert_eq!(Ok(round_trip::<EncryptionConfiguration>(&key)), made);
    }

    #[test]
    fn a_configuration_is_complete_or_rejected() {
        let group = || Some("arn:aws:logs:us-east-1:111111111111:log-group:g:*".to_owned());
        let rejected = |level, groups| LoggingConfiguration::new(level, false, groups).is_err();
        assert!(rejected(LogLevel::All, vec![]), "no destination");
        assert!(rejected(LogLevel::Off, vec![None]), "a destination without a group");
        assert!(rejected(LogLevel::Error, vec![group(), group()]), "two destinations");
        assert!(!rejected(LogLevel::Off, vec![]) && !rejected(LogLevel::Fatal, vec![group()]));
        assert_eq!(
            EncryptionConfiguration::customer_managed(None, Some(60)),
            Err(ConfigurationRejection::KeyMissing)
        );
        assert_eq!(
            EncryptionConfiguration::aws_owned(Some("alias/k")),
            Err(ConfigurationRejection::KeyUnexpected)
        );
    }
}
