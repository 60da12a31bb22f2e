//! The Step Functions API (awsJson1_0).
