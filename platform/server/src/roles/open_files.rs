//! The limit of open files and sockets, and the number of connections that it permits.
//!
//! Shells and systemd start programs with a limit of 1024, for programs that use `select`, and let programs raise it.
//! At the limit no part of the process can open anything.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The upper bound of files: the kernel's default (`fs.nr_open`).
const FILES_MAX: u64 = 1 << 20;
/// Files reserved for everything except connections from outside: database, logs, components, outbound connections of
/// functions. At least this many, and this share of a higher limit.
const RESERVE_MIN: usize = 512;
const RESERVE_SHARE: usize = 32;
/// Connections reserved for the API and the workflows API each at a low limit: at least this many, and a share of a
/// higher limit. Half of a port's connections may come from one address, and many clients of the API open a connection
/// for each watch.
const API_MIN: usize = 128;
const API_SHARE: usize = 8;
const WORKFLOWS_SHARE: usize = 16;
/// The number of connections of the workflows API: an SDK's worker has a few.
const WORKFLOWS_MAX: usize = 10_000;
/// The number of connections of the admin port, for probes, metrics and a dashboard.
const ADMIN: usize = 64;

/// The number of concurrent connections from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connections {
    pub(super) functions: usize,
    pub(super) api: usize,
    pub(super) workflows: usize,
    pub(super) admin: usize,
}

/// Raises the limit of open files as far as possible; returns the numbers of connections for it.
pub(super) fn connections() -> Connections {
    let wanted = Connections {
        functions: mayfly_gateway::Config::CONNECTIONS_MAX_DEFAULT,
        api: mayfly_apiserver::Config::CONNECTIONS_MAX_DEFAULT,
        workflows: WORKFLOWS_MAX,
        admin: ADMIN,
    };
    let files = raise();
    let room = wanted.within(files);
    if room != wanted {
        tracing::warn!(
            functions = room.functions,
            api = room.api,
            "the limit of {files} open files leaves room for fewer connections than {} and {}; raise it: ulimit -Hn, \
             or LimitNOFILE= of the service",
            wanted.functions,
            wanted.api
        );
    }
    room
}

/// Raises the limit; returns the current one.
fn raise() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let soft = limit.current.unwrap_or(FILES_MAX);
    let wanted = limit.maximum.unwrap_or(FILES_MAX).min(FILES_MAX);
    if soft >= wanted {
        return soft;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }) {
        Ok(()) => wanted,
        Err(error) => {
            tracing::warn!(%error, soft, wanted, "cannot raise the limit of open files");
            soft
        }
    }
}

impl Connections {
    /// Reduces the numbers to what this many files permit. Functions have precedence, since they have most clients.
    fn within(self, files: u64) -> Self {
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        let room = files.saturating_sub(RESERVE_MIN.max(files / RESERVE_SHARE) + self.admin);
        let api_kept = API_MIN.max(files / API_SHARE);
        let workflows_kept = API_MIN.max(files / WORKFLOWS_SHARE);
        let functions = self.functions.min(room.saturating_sub(api_kept + workflows_kept)).max(1);
        let room = room.saturating_sub(functions);
        let workflows = self.workflows.min(room * workflows_kept / (api_kept + workflows_kept)).max(1);
        let api = self.api.min(room.saturating_sub(workflows)).max(1);
        Self { functions, api, workflows, admin: self.admin }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_the_rest() {
        let wanted = Connections { functions: 32_768, api: 10_000, workflows: 10_000, admin: 64 };
        for (files, functions, api, workflows) in [
            (1 << 20, 32_768, 10_000, 10_000),
            (65_536, 32_768, 10_000, 10_000),
            (20_000, 15_561, 2500, 1250),
            (4096, 2752, 512, 256),
            (1024, 192, 128, 128),
            (500, 1, 1, 1),
        ] {
            let expected = Connections { functions, api, workflows, admin: 64 };
            assert_eq!(wanted.within(files), expected, "{files}");
        }
    }

    #[test]
    fn the_limit_is_raised_as_far_as_may_be() {
        let hard = getrlimit(Resource::Nofile).maximum;
        let most = hard.unwrap_or(FILES_MAX).min(FILES_MAX);
        let low = Rlimit { current: Some(most / 2), maximum: hard };
        setrlimit(Resource::Nofile, low).unwrap();
        assert_eq!(raise(), most);
        assert_eq!(getrlimit(Resource::Nofile).current, Some(most));
        assert_eq!(raise(), most);
    }
}
