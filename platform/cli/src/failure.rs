//! Errors for users: one line about the error, one about the remedy.

use std::{fmt, io, process::ExitCode};

use serde_json::{Value, json};

mod code;

pub(crate) use code::CodeContext;
pub use code::ErrorCode;

/// An error with a code and a known remedy.
#[derive(Debug)]
pub struct Failure {
    code: ErrorCode,
    what: String,
    todo: String,
}

impl Failure {
    pub fn new(code: ErrorCode, what: impl Into<String>, todo: impl Into<String>) -> Self {
        Self { code, what: what.into(), todo: todo.into() }
    }

    /// Creates a failure to return with `?`.
    pub fn error(code: ErrorCode, what: impl Into<String>, todo: impl Into<String>) -> anyhow::Error {
        Self::new(code, what, todo).into()
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

/// Prints an error to stderr, as text or as one line of JSON; the exit code is 1. A closed stdout (`| head`) is not an
/// error.
pub fn report(error: &anyhow::Error, is_json: bool) -> ExitCode {
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.chain().next().is_some_and(closed) {
        return ExitCode::SUCCESS;
    }
    match is_json {
        true => super::output::note(as_json(error)),
        false => super::output::note(format_args!("error: {}", text(error))),
    }
    ExitCode::FAILURE
}

/// The end of a command by Ctrl-C. Only programs get a message: a person knows the cause.
pub(crate) fn interrupted(is_json: bool) -> ExitCode {
    if is_json {
        let error = Failure::error(ErrorCode::Interrupted, "interrupted", "run the command again");
        super::output::note(as_json(&error));
    }
    ExitCode::from(super::EXIT_INTERRUPTED)
}

/// `{"error": {"code": …, "message": …, "hint": …}}`, in the form of the gateway's errors.
fn as_json(error: &anyhow::Error) -> Value {
    let (message, todo) = parts(error);
    json!({"error": {"code": code(error).text(), "message": message, "hint": todo}})
}

/// The error's code in docs/errors.md: that of a failure or of the API in the chain, then that of a context, then that
/// of an error of the operating system.
fn code(error: &anyhow::Error) -> ErrorCode {
    let specific = |cause: &(dyn std::error::Error + 'static)| {
        if let Some(failure) = cause.downcast_ref::<Failure>() {
            return Some(failure.code.clone());
        }
        match cause.downcast_ref() {
            Some(kube::Error::Api(status)) => Some(ErrorCode::of_status(status.code)),
            _ => None,
        }
    };
    let of_context = || error.downcast_ref::<CodeContext>().map(|context| context.0.clone());
    let of_system = || error.chain().find_map(|cause| cause.downcast_ref().map(ErrorCode::of_io));
    error.chain().find_map(specific).or_else(of_context).or_else(of_system).unwrap_or(ErrorCode::Failed)
}

/// The chain of causes in one line, and the remedy below it if the chain contains a [`Failure`].
pub fn text(error: &anyhow::Error) -> String {
    let (mut text, todo) = parts(error);
    for line in todo.lines() {
        text.push_str("\n  ");
        text.push_str(line);
    }
    text
}

/// The chain of causes in one line, and the remedy; empty without one.
fn parts(error: &anyhow::Error) -> (String, &str) {
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
        if !part.is_empty() && !parts.iter().any(|earlier| earlier.contains(&part)) {
            parts.push(part);
        }
    }
    (parts.join(": "), todo)
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn one_line_what_one_line_what_to_do() {
        let error = Failure::error(ErrorCode::Failed, "the sky is grey", "wait for the sun");
        assert_eq!(text(&error), "the sky is grey\n  wait for the sun");
        let error = Err::<(), _>(error).context("cannot fly").unwrap_err();
        assert_eq!(text(&error), "cannot fly: the sky is grey\n  wait for the sun");
    }

    #[test]
    fn an_error_has_a_code_for_programs() {
        let api = |status: u16| {
            let status = kube::core::Status::failure("no", "").with_code(status);
            anyhow::Error::from(kube::Error::Api(Box::new(status)))
        };
        let coded = || Failure::error(ErrorCode::NoServer, "nobody answers", "start one");
        let build = CodeContext(ErrorCode::BuildFailed);
        for (error, expected) in [
            (coded(), "no_server"),
            (coded().context("deploying"), "no_server"),
            (coded().context(build.clone()), "no_server"),
            (anyhow::anyhow!("cargo failed").context(build.clone()), "build_failed"),
            (anyhow::Error::from(io::Error::other("no")).context(build), "build_failed"),
            (anyhow::Error::from(io::Error::other("no")).context("reading"), "file_error"),
            (api(404).context("deploying"), "not_found"),
            (api(507), "server_error"),
            (anyhow::anyhow!("the sky is grey"), "failed"),
        ] {
            assert_eq!(code(&error).text(), expected, "{error:?}");
        }
        let error = coded().context("deploying").context(CodeContext(ErrorCode::BuildFailed));
        assert_eq!(text(&error), "deploying: nobody answers\n  start one");
        let expected =
            json!({"code": "no_server", "message": "deploying: nobody answers", "hint": "start one"});
        assert_eq!(as_json(&error), json!({"error": expected}));
    }

    #[test]
    fn a_cause_is_not_said_twice() {
        let inner = io::Error::other("no space");
        let error = anyhow::Error::new(inner).context("cannot write: no space");
        assert_eq!(text(&error), "cannot write: no space");
    }
}
