//! The function's settings: `spec.env` of its manifest, including ConfigMap and Secret values. They are environment
//! variables, so `std::env` works as well.

use std::fmt;
use std::str::FromStr;

/// The value of a setting, if it is set.
pub fn get(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The value of a required setting.
pub fn require(name: &str) -> Result<String, ConfigError> {
    get(name).ok_or_else(|| ConfigError { name: name.to_owned(), problem: "is not set".to_owned() })
}

/// A setting as a number, an address or any other type that can be parsed; `default` if it is not set. A value that
/// cannot be parsed is an error, never the default.
///
/// ```
/// let retries: u32 = mayfly::config::parse_or("RETRIES", 3)?;
/// # Ok::<(), mayfly::config::ConfigError>(())
/// ```
pub fn parse_or<T>(name: &str, default: T) -> Result<T, ConfigError>
where
    T: FromStr,
    T::Err: fmt::Display,
{
    let Some(text) = get(name) else { return Ok(default) };
    text.parse()
        .map_err(|error| ConfigError { name: name.to_owned(), problem: format!("is {text:?}: {error}") })
}

/// A setting that is missing or cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    name: String,
    problem: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the setting {} {}; set it under spec.env of the function", self.name, self.problem)
    }
}

impl std::error::Error for ConfigError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_settings_say_where_to_set_them() {
        let error = require("MAYFLY_TEST_NOT_SET").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the setting MAYFLY_TEST_NOT_SET is not set; set it under spec.env of the function"
        );
        assert_eq!(parse_or("MAYFLY_TEST_NOT_SET", 3), Ok(3));
    }

    #[test]
    fn a_bad_value_is_not_the_default() {
        // PATH is set wherever cargo runs, and is not a number.
        assert!(parse_or("PATH", 3).is_err());
    }
}
