//! Asynchronous invocations of a function: retries, age, and the destination of events that failed.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::duration::Span;

/// The rules of a function's asynchronous invocations. The terms are those of Lambda's event invoke configuration.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct AsyncInvocation {
    /// Retries after a failed attempt. A call that the function has no capacity for is not a failed attempt. Default
    /// 2.
    pub maximum_retry_attempts: u32,
    /// The delay of the first retry; each further one is twice as long, up to 5m. Default 1s.
    pub retry_delay: Span,
    /// The age at which an event is given up, regardless of its attempts. Default 6h.
    pub maximum_event_age: Span,
    /// The destination of events that were given up (a dead-letter target). Without one they are only listed as
    /// failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<FailureDestination>,
}

impl AsyncInvocation {
    pub const RETRY_ATTEMPTS_DEFAULT: u32 = 2;
    pub const RETRY_ATTEMPTS_MAX: u32 = 100;
    pub const RETRY_DELAY_DEFAULT: Span = Span::from_secs(1);
    /// The longest delay between two attempts.
    pub const RETRY_DELAY_MAX: Span = Span::from_secs(300);
    /// Lambda's default and maximum.
    pub const EVENT_AGE_DEFAULT: Span = Span::from_secs(6 * 3600);
    /// Longer than Lambda permits, for a target that is down over a long weekend.
    pub const EVENT_AGE_MAX: Span = Span::from_secs(7 * 24 * 3600);
}

impl Default for AsyncInvocation {
    fn default() -> Self {
        Self {
            maximum_retry_attempts: Self::RETRY_ATTEMPTS_DEFAULT,
            retry_delay: Self::RETRY_DELAY_DEFAULT,
            maximum_event_age: Self::EVENT_AGE_DEFAULT,
            on_failure: None,
        }
    }
}

/// The destination of events that were given up, in the same namespace. Exactly one field is set.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FailureDestination {
    /// A function that receives the event's record by POST.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// A workflow that is started with the event's record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workflow: Option<String>,
    /// A URL that receives the event's record by POST.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}
