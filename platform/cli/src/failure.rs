//! Errors for users: one line about the error, one about the remedy.

use std::{borrow::Cow, fmt, io, process::ExitCode};

use serde_json::{Value, json};

/// No server was found, or none answers.
pub(crate) const NO_SERVER: &str = "no_server";
/// The server has a certificate that the kubeconfig does not trust.
pub(crate) const NOT_TRUSTED: &str = "not_trusted";
/// The kubeconfig cannot be used.
pub(crate) const BAD_KUBECONFIG: &str = "bad_kubeconfig";
/// A function did not become ready.
pub(crate) const NOT_READY: &str = "not_ready";
/// A project or a script was not built.
pub(crate) const BUILD_FAILED: &str = "build_failed";
/// Any other failure.
const FAILED: &str = "failed";

/// The code of an error of the API, by its HTTP status.
pub(crate) fn code_of_status(status: u16) -> &'static str {
    match status {
        401 => "unauthorized",
        403 => "forbidden",
        404 => "not_found",
        409 => "conflict",
        400 | 413 | 415 | 422 => "invalid",
        429 => "busy",
        _ => "server_error",
    }
}

/// An error with a known remedy.
#[derive(Debug)]
pub struct Failure {
    what: String,
    todo: String,
    /// The code for programs, if it is not that of any other failure.
    code: Option<Cow<'static, str>>,
}

impl Failure {
    pub fn new(what: impl Into<String>, todo: impl Into<String>) -> Self {
        Self { what: what.into(), todo: todo.into(), code: None }
    }

    /// Creates a failure to return with `?`.
    pub fn error(what: impl Into<String>, todo: impl Into<String>) -> anyhow::Error {
        Self::new(what, todo).into()
    }

    /// The same failure with a code of docs/errors.md.
    #[must_use]
    pub(crate) fn code(self, code: impl Into<Cow<'static, str>>) -> Self {
        Self { code: Some(code.into()), ..self }
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

/// A context that only gives an error its code: the messages leave it out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodeContext(pub(crate) &'static str);

impl fmt::Display for CodeContext {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

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

/// `{"error": {"code": …, "message": …, "hint": …}}`, in the form of the gateway's errors.
fn as_json(error: &anyhow::Error) -> Value {
    let (message, todo) = parts(error);
    json!({"error": {"code": code(error), "message": message, "hint": todo}})
}

/// The error's code in docs/errors.md.
fn code(error: &anyhow::Error) -> Cow<'static, str> {
    if let Some(CodeContext(code)) = error.downcast_ref() {
        return Cow::Borrowed(*code);
    }
    let coded = error.chain().find_map(|cause| match (cause.downcast_ref(), cause.downcast_ref()) {
        (Some(Failure { code: Some(code), .. }), _) => Some(code.clone()),
        (_, Some(kube::Error::Api(status))) => Some(Cow::Borrowed(code_of_status(status.code))),
        _ => None,
    });
    coded.unwrap_or(Cow::Borrowed(FAILED))
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
        let error = Failure::error("the sky is grey", "wait for the sun");
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
        let coded = || anyhow::Error::from(Failure::new("nobody answers", "start one").code(NO_SERVER));
        for (error, expected) in [
            (coded(), "no_server"),
            (coded().context("deploying"), "no_server"),
            (anyhow::anyhow!("cargo failed").context(CodeContext(BUILD_FAILED)), "build_failed"),
            (api(404).context("deploying"), "not_found"),
            (api(507), "server_error"),
            (Failure::error("the sky is grey", ""), "failed"),
        ] {
            assert_eq!(code(&error), expected, "{error:?}");
        }
        let error = coded().context("deploying").context(CodeContext(BUILD_FAILED));
        assert_eq!(text(&error), "deploying: nobody answers\n  start one");
        let expected =
            json!({"code": "build_failed", "message": "deploying: nobody answers", "hint": "start one"});
        assert_eq!(as_json(&error), json!({"error": expected}));
    }

    #[test]
    fn every_code_is_documented() {
        let page = include_str!("../../../docs/errors.md");
        let statuses = [400, 401, 403, 404, 409, 429, 500].map(code_of_status);
        let codes = [NO_SERVER, NOT_TRUSTED, BAD_KUBECONFIG, NOT_READY, BUILD_FAILED, FAILED];
        let table = page.split("## Command line").nth(1).unwrap();
        for code in statuses.iter().chain(&codes) {
            assert!(table.contains(&format!("| `{code}` |")), "docs/errors.md has no row for {code}");
        }
    }

    #[test]
    fn a_cause_is_not_said_twice() {
        let inner = io::Error::other("no space");
        let error = anyhow::Error::new(inner).context("cannot write: no space");
        assert_eq!(text(&error), "cannot write: no space");
    }
}
