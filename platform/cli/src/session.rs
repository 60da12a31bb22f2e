//! The state shared within one run of a command: the global flags, and the server once it is found.

use tokio::sync::OnceCell;

use super::{
    Globals,
    discovery::Discovery,
    failure::{ErrorCode, Failure},
    find,
    output::OutputFormat,
    server::{Server, is_unanswered},
};

/// One run of a command.
pub(crate) struct Session {
    globals: Globals,
    server: OnceCell<Server>,
    discovery: OnceCell<Discovery>,
}

impl Session {
    pub(crate) fn new(globals: Globals) -> Self {
        Self { globals, server: OnceCell::new(), discovery: OnceCell::new() }
    }

    pub(crate) fn globals(&self) -> &Globals {
        &self.globals
    }

    pub(crate) fn format(&self) -> OutputFormat {
        self.globals.output.unwrap_or_default()
    }

    /// The server; found at the first call.
    pub(crate) async fn server(&self) -> anyhow::Result<&Server> {
        self.server.get_or_try_init(|| async { find::find(&self.globals).await }).await
    }

    /// The kinds that the server serves; requested once.
    pub(crate) async fn discovery(&self) -> anyhow::Result<&Discovery> {
        let server = self.server().await?;
        self.discovery.get_or_try_init(|| Discovery::fetch(server)).await
    }

    /// The namespace to work in.
    pub(crate) async fn namespace(&self) -> anyhow::Result<String> {
        match &self.globals.namespace {
            Some(namespace) => Ok(namespace.clone()),
            None => Ok(self.server().await?.namespace().to_owned()),
        }
    }

    /// Adds information to an error: the places where a server was looked for if none answered, or the remedy for an
    /// error of the API.
    pub(crate) fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let Some(server) = self.server.get() else { return error };
        let is_ours = |cause: &&(dyn std::error::Error + 'static)| cause.is::<kube::Error>();
        let Some(cause) = error.chain().find(is_ours).and_then(|cause| cause.downcast_ref::<kube::Error>())
        else {
            return error;
        };
        let explained: anyhow::Error = match cause {
            // The body was JSON, but no `Status`.
            kube::Error::Api(status) if status.code == 0 => {
                server.places().nothing_answers(&server.url(), "the response is not of the Kubernetes API")
            }
            kube::Error::Api(status) => {
                let (what, todo) = api_failure(status, server);
                Failure::new(ErrorCode::of_status(status.code), what, todo).into()
            }
            _ => match innermost(cause) {
                Some(why) if why.contains("certificate") => server.places().not_trusted(&server.url(), &why),
                Some(why) if why.contains("InvalidContentType") => {
                    server.places().nothing_answers(&server.url(), "the port does not use TLS")
                }
                Some(why) => server.places().nothing_answers(&server.url(), &why),
                None => return error,
            },
        };
        // The error's own context stays in front.
        let doing: Vec<_> =
            error.chain().take_while(|cause| !is_ours(cause)).map(ToString::to_string).collect();
        doing.into_iter().rev().fold(explained, |error, doing| error.context(doing))
    }
}

/// The API's message and a remedy.
fn api_failure(status: &kube::core::Status, server: &Server) -> (String, String) {
    let (message, kind) = refusal(status);
    let what = match message.is_empty() {
        true => format!("the server answered {} {}", status.code, status.reason),
        false => message.to_owned(),
    };
    let todo = match (status.code, status.reason.as_str()) {
        (401, _) => format!("{} does not accept this token; {}", server.url(), server.places().origin_text()),
        (403, _) => "this user lacks the permission".to_owned(),
        (404, "NotFound") if is_about(status, "namespaces") => {
            let name = status.details.as_ref().map_or("NAME", |details| details.name.as_str());
            format!("see what there is: mayfly get namespaces; make it with: kubectl create namespace {name}")
        }
        (404, "NotFound") => match status.details.as_ref().filter(|details| !details.kind.is_empty()) {
            Some(details) => format!("see what there is: mayfly get {} -A", details.kind),
            None => "see what there is: mayfly get functions -A".to_owned(),
        },
        (409, "Conflict") if what.starts_with("Apply failed") => {
            "take the fields over with --force-conflicts, or leave them out of the manifest".to_owned()
        }
        (409, "Conflict") if what.contains("has been modified") => {
            "it was changed concurrently: try again".to_owned()
        }
        // Only errors about an object have details; an upload, for example, has no manifest.
        (422, _)
            if kind.is_none()
                && status.details.as_ref().is_some_and(|details| !details.causes.is_empty()) =>
        {
            "correct the manifest; mayfly explain KIND shows the fields".to_owned()
        }
        (400 | 422, _) if kind.is_some() => {
            let kind = kind.map(str::to_lowercase).filter(|kind| !kind.is_empty());
            format!(
                "correct the manifest; mayfly explain {} shows the fields",
                kind.as_deref().unwrap_or("KIND")
            )
        }
        (429, _) => "the server is busy: try again in a moment".to_owned(),
        // The message about a full disk contains its remedy; the log has no more information.
        (507, _) => String::new(),
        (500.., _) => "see the server's log".to_owned(),
        _ => String::new(),
    };
    (what, todo)
}

fn is_about(status: &kube::core::Status, kind: &str) -> bool {
    status.details.as_ref().is_some_and(|details| details.kind == kind)
}

/// The text before and after the kind in the API's message about a manifest that does not decode as its kind.
const MISFIT: (&str, &str) = (" in version ", " cannot be handled as a ");
/// The prefix of the API's message about a patch, which follows as quoted text.
const BAD_PATCH: &str = "\"\" is invalid: patch: Invalid value: \"";
/// The prefix of the error about unknown and duplicate fields.
const STRICT: &str = "strict decoding error: ";

/// The reason of a refusal, without the parts that repeat the request; and the kind of the manifest, or `None` if the
/// object itself cannot be decoded.
pub(crate) fn refusal(status: &kube::core::Status) -> (&str, Option<&str>) {
    let message = status.message.as_str();
    let (why, kind) = match (message.strip_prefix(BAD_PATCH), message.split_once(MISFIT.1)) {
        (Some(rest), _) => match after_quoted(rest) {
            Some(why) => (why, ""),
            None => return (message, None),
        },
        (None, Some((start, rest))) if start.contains(MISFIT.0) => match rest.split_once(": ") {
            Some((kind, why)) => (why, kind),
            None => return (message, None),
        },
        _ => return (message, None),
    };
    (why.strip_prefix(STRICT).unwrap_or(why), Some(kind))
}

/// The text after a quoted string and a colon; `text` starts inside the quotes, where quotes are escaped.
fn after_quoted(text: &str) -> Option<&str> {
    let mut escaped = false;
    let end = text.find(|letter| match (escaped, letter) {
        (true, _) => {
            escaped = false;
            false
        }
        (false, '\\') => {
            escaped = true;
            false
        }
        (false, letter) => letter == '"',
    })?;
    text[end + 1..].strip_prefix(": ")
}

/// The innermost cause of a connection error; `None` for a response with an error.
fn innermost(error: &kube::Error) -> Option<String> {
    if !is_unanswered(error) {
        return None;
    }
    Some(crate::http_client::innermost(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_the_reason_alone() {
        let field = "strict decoding error: unknown field \"spec.bogus\"";
        let patch = format!("{:?}", "{\"spec\":{\"a\":\"b\\\": c\"}}");
        for (message, expected) in [
            (
                format!("\"\" is invalid: patch: Invalid value: {patch}: {field}"),
                ("unknown field \"spec.bogus\"", Some("")),
            ),
            (
                format!("Function in version \"v1\" cannot be handled as a Function: {field}"),
                ("unknown field \"spec.bogus\"", Some("Function")),
            ),
            (
                "Function in version \"v1\" cannot be handled as a Function: spec.limits: not a map: 1"
                    .into(),
                ("spec.limits: not a map: 1", Some("Function")),
            ),
            ("Pod \"a\" is invalid: spec: no".into(), ("Pod \"a\" is invalid: spec: no", None)),
            (
                "\"\" is invalid: patch: Invalid value: \"cut".into(),
                ("\"\" is invalid: patch: Invalid value: \"cut", None),
            ),
        ] {
            let status = kube::core::Status::failure(&message, "Invalid").with_code(422);
            assert_eq!(refusal(&status), expected, "{message}");
        }
    }
}
