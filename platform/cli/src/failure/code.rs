//! The codes of failures, for programs: `error.code` with `--output json`.

use std::{fmt, io};

/// Defines the codes, their texts, and the list of them that docs/errors.md is checked against.
macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// The class of a failure; docs/errors.md has the cause and the remedy of each.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum ErrorCode {
            $($(#[$doc])* $name,)*
            /// A code of another API, such as `StateMachineDoesNotExist`.
            Foreign(String),
        }

        impl ErrorCode {
            /// All codes except those of other APIs.
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$name),*];

            /// The text for programs.
            pub fn text(&self) -> &str {
                match self {
                    $(Self::$name => $text,)*
                    Self::Foreign(text) => text,
                }
            }
        }
    };
}

error_codes! {
    /// No server was found, or none answers.
    NoServer = "no_server",
    /// The server has a certificate that the kubeconfig does not trust.
    NotTrusted = "not_trusted",
    /// The kubeconfig cannot be used.
    BadKubeconfig = "bad_kubeconfig",
    /// The server does not accept the credentials.
    Unauthorized = "unauthorized",
    /// The user lacks a permission.
    Forbidden = "forbidden",
    /// An object, a kind or a field does not exist on the server.
    NotFound = "not_found",
    /// The object's present state contradicts the change.
    Conflict = "conflict",
    /// The server refuses the object or the file.
    Invalid = "invalid",
    /// The server accepts no more requests now.
    Busy = "busy",
    /// Any other error of the server.
    ServerError = "server_error",
    /// Flags or arguments contradict each other, the project or the object.
    Usage = "usage",
    /// A local file or folder cannot be found, read or written.
    FileError = "file_error",
    /// A local file was read, but its content cannot be used.
    InvalidFile = "invalid_file",
    /// A project or a script was not built.
    BuildFailed = "build_failed",
    /// A function cannot run.
    NotReady = "not_ready",
    /// A time limit of the command expired.
    TimedOut = "timed_out",
    /// The command was ended by Ctrl-C.
    Interrupted = "interrupted",
    /// The command failed for some of several objects.
    Partial = "partial",
    /// A job ended without a result, or the response of a function ended early.
    RunFailed = "run_failed",
    /// The server, or this build, does not have the feature.
    Unsupported = "unsupported",
    /// Any other failure.
    Failed = "failed",
}

impl ErrorCode {
    /// The code of an error of the Kubernetes API, by its HTTP status.
    pub(crate) fn of_status(status: u16) -> Self {
        match status {
            401 => Self::Unauthorized,
            403 => Self::Forbidden,
            404 => Self::NotFound,
            409 => Self::Conflict,
            400 | 413 | 415 | 422 => Self::Invalid,
            429 => Self::Busy,
            _ => Self::ServerError,
        }
    }

    /// The code of an error of the operating system.
    pub(super) fn of_io(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable => Self::NoServer,
            io::ErrorKind::TimedOut => Self::TimedOut,
            _ => Self::FileError,
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// A context that only gives an error its code: the messages leave it out. The code of a [`super::Failure`] in the
/// chain takes precedence, because it is more specific.
#[derive(Clone, Debug)]
pub(crate) struct CodeContext(pub(crate) ErrorCode);

impl fmt::Display for CodeContext {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_codes_and_their_documentation_agree() {
        let page = include_str!("../../../../docs/errors.md");
        let (_, section) = page.split_once("## Command line").unwrap();
        let (table, _) = section.split_once("| exit code |").unwrap();
        let row_code = |line: &'static str| line.strip_prefix("| `")?.split('`').next();
        let documented: BTreeSet<&str> = table.lines().filter_map(row_code).collect();
        let defined: BTreeSet<&str> = ErrorCode::ALL.iter().map(ErrorCode::text).collect();
        assert_eq!(documented, defined);
        assert_eq!(defined.len(), ErrorCode::ALL.len(), "two codes have the same text");
    }

    #[test]
    fn an_error_of_a_connection_is_not_one_of_a_file() {
        for (kind, expected) in [
            (io::ErrorKind::ConnectionRefused, ErrorCode::NoServer),
            (io::ErrorKind::TimedOut, ErrorCode::TimedOut),
            (io::ErrorKind::NotFound, ErrorCode::FileError),
            (io::ErrorKind::PermissionDenied, ErrorCode::FileError),
        ] {
            assert_eq!(ErrorCode::of_io(&io::Error::from(kind)), expected);
        }
    }
}
