//! Errors for users: one line about the error, one about the remedy.

use std::{fmt, io, process::ExitCode};

/// An error with a known remedy.
#[derive(Debug)]
pub struct Failure {
    what: String,
    todo: String,
}

impl Failure {
    pub fn new(what: impl Into<String>, todo: impl Into<String>) -> Self {
        Self { what: what.into(), todo: todo.into() }
    }

    /// Creates a failure to return with `?`.
    pub fn error(what: impl Into<String>, todo: impl Into<String>) -> anyhow::Error {
        Self::new(what, todo).into()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        for line in self.todo.lines() {
            write!(f, "\n  {line}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Prints an error to stderr; the exit code is 1. A closed stdout (`| head`) is not an error.
pub fn report(error: &anyhow::Error) -> ExitCode {
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.chain().next().is_some_and(closed) {
        return ExitCode::SUCCESS;
    }
    super::output::note(format_args!("error: {}", text(error)));
    ExitCode::FAILURE
}

/// The chain of causes in one line, and the remedy below it if the chain contains a [`Failure`].
pub fn text(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut todo = "";
    for cause in error.chain() {
        let part = match cause.downcast_ref::<Failure>() {
            Some(failure) => {
                todo = &failure.todo;
                failure.what.clone()
            }
            None => cause.to_string(),
        };
        // Many errors already contain the text of their cause.
        if !parts.iter().any(|earlier| earlier.contains(&part)) {
            parts.push(part);
        }
    }
    let mut text = parts.join(": ");
    for line in todo.lines() {
        text.push_str("\n  ");
        text.push_str(line);
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn one_line_what_one_line_what_to_do() {
        let error = Failure::error("the sky is grey", "wait for the sun");
        assert_eq!(text(&error), "the sky is grey\n  wait for the sun");
        let error = Err::<(), _>(error).context("cannot fly").unwrap_err();
        assert_eq!(text(&error), "cannot fly: the sky is grey\n  wait for the sun");
    }

    #[test]
    fn a_cause_is_not_said_twice() {
        let inner = io::Error::other("no space");
        let error = anyhow::Error::new(inner).context("cannot write: no space");
        assert_eq!(text(&error), "cannot write: no space");
    }
}
