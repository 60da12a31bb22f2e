//! Structured log lines: one JSON object each, `debug` and `info` to stdout, `warn` and `error` to stderr. The platform
//! adds time and pod.
//!
//! ```
//! let (user, count) = ("ada", 3);
//! mayfly::log::info!("sent {count} letters");
//! mayfly::log::warn!(user = user, count = count; "mailbox nearly full");
//! ```
//!
//! The setting `MAYFLY_LOG` (`debug`, `info`, `warn`, `error` or `off`; default `info`) sets the lowest level that is
//! written.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::OnceLock;

#[doc(inline)]
pub use crate::{__debug as debug, __error as error, __info as info, __warn as warn};

/// The severity of a line, ascending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Details for debugging.
    Debug,
    /// Normal events.
    Info,
    /// Unexpected events that were handled.
    Warn,
    /// Failures.
    Error,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Debug => "debug",
            Level::Info => "info",
            Level::Warn => "warn",
            Level::Error => "error",
        }
    }
}

/// Whether lines of this level are written.
pub fn enabled(level: Level) -> bool {
    static LEAST: OnceLock<Option<Level>> = OnceLock::new();
    LEAST
        .get_or_init(|| least(crate::config::get("MAYFLY_LOG").as_deref()))
        .is_some_and(|least| level >= least)
}

fn least(setting: Option<&str>) -> Option<Level> {
    match setting {
        Some("debug") => Some(Level::Debug),
        Some("warn") => Some(Level::Warn),
        Some("error") => Some(Level::Error),
        Some("off") => None,
        _ => Some(Level::Info),
    }
}

/// Writes one line. The macros call this.
#[doc(hidden)]
pub fn write(level: Level, fields: &[(&str, &dyn fmt::Display)], message: fmt::Arguments<'_>) {
    if !enabled(level) {
        return;
    }
    let line = line(level, fields, message);
    // A failed write to the log must not fail the request.
    let _ = match level {
        Level::Debug | Level::Info => std::io::stdout().write_all(line.as_bytes()),
        Level::Warn | Level::Error => std::io::stderr().write_all(line.as_bytes()),
    };
}

fn line(level: Level, fields: &[(&str, &dyn fmt::Display)], message: fmt::Arguments<'_>) -> String {
    let mut line = String::from("{\"level\":\"");
    line.push_str(level.name());
    line.push_str("\",\"message\":");
    quote(&mut line, &message);
    for (name, value) in fields {
        line.push(',');
        quote(&mut line, name);
        line.push(':');
        quote(&mut line, value);
    }
    line.push_str("}\n");
    line
}

/// Appends a value as a JSON string.
fn quote(line: &mut String, value: &dyn fmt::Display) {
    line.push('"');
    // Writing to a String cannot fail.
    let _ = write!(Escape(line), "{value}");
    line.push('"');
}

struct Escape<'a>(&'a mut String);

impl fmt::Write for Escape<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '"' => self.0.push_str("\\\""),
                '\\' => self.0.push_str("\\\\"),
                '\n' => self.0.push_str("\\n"),
                '\r' => self.0.push_str("\\r"),
                '\t' => self.0.push_str("\\t"),
                c if c < ' ' => write!(self.0, "\\u{:04x}", c as u32)?,
                c => self.0.push(c),
            }
        }
        Ok(())
    }
}

#[doc(hidden)]
#[macro_export]
macro_rules! __log {
    ($level:ident, $($name:ident = $value:expr),+ ; $($message:tt)+) => {
        $crate::log::write(
            $crate::log::Level::$level,
            &[$((stringify!($name), &$value)),+],
            format_args!($($message)+),
        )
    };
    ($level:ident, $($message:tt)+) => {
        $crate::log::write($crate::log::Level::$level, &[], format_args!($($message)+))
    };
}

/// Logs details for debugging; only written with `MAYFLY_LOG=debug`.
#[doc(hidden)]
#[macro_export]
macro_rules! __debug {
    ($($arguments:tt)+) => { $crate::__log!(Debug, $($arguments)+) };
}

/// Logs a normal event.
#[doc(hidden)]
#[macro_export]
macro_rules! __info {
    ($($arguments:tt)+) => { $crate::__log!(Info, $($arguments)+) };
}

/// Logs an unexpected event that was handled.
#[doc(hidden)]
#[macro_export]
macro_rules! __warn {
    ($($arguments:tt)+) => { $crate::__log!(Warn, $($arguments)+) };
}

/// Logs a failure.
#[doc(hidden)]
#[macro_export]
macro_rules! __error {
    ($($arguments:tt)+) => { $crate::__log!(Error, $($arguments)+) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_json_object() {
        let text = line(Level::Warn, &[("user", &"a\"b"), ("count", &3)], format_args!("two\nlines\u{1}"));
        assert!(text.ends_with("}\n") && text.matches('\n').count() == 1);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            value,
            serde_json::json!({"level": "warn", "message": "two\nlines\u{1}", "user": "a\"b", "count": "3"})
        );
    }

    #[test]
    fn levels_are_ordered_and_info_is_the_default() {
        assert_eq!(least(None), Some(Level::Info));
        assert_eq!(least(Some("nonsense")), Some(Level::Info));
        assert_eq!(least(Some("off")), None);
        assert!(Level::Error > Level::Warn && Level::Warn > Level::Info && Level::Info > Level::Debug);
    }
}
