//! The event collector: removes Events that are older than a time, by default an hour, or exceed a maximum number.

use std::time::Duration;

use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams},
};
use mayfly_api::k8s::{
    api::core::v1::Event,
    jiff::{SignedDuration, Timestamp},
};
use tokio_util::sync::CancellationToken;

use crate::{metadata::is_gone, resync::ResyncTicker};

/// The settings of the event collector.
#[derive(Clone, Debug)]
pub struct Config {
    /// The interval of its rounds.
    pub every: Duration,
    /// The time for which an event is kept after its last occurrence. Upstream's value.
    pub keep_for: Duration,
    /// Events that are kept.
    pub events_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { every: Duration::from_secs(60), keep_for: Duration::from_secs(3600), events_max: 10_000 }
    }
}

/// Removes old events. It lists them in each round, because a cached copy would be used for nothing else.
pub(crate) struct EventCollector {
    config: Config,
    client: Client,
}

/// Namespace, name and time of an event.
type Seen = (String, String, Option<Timestamp>);

fn key_and_time(event: &Event) -> Seen {
    let last = event.last_timestamp.as_ref().or(event.first_timestamp.as_ref());
    let last = last.or(event.metadata.creation_timestamp.as_ref()).map(|time| time.0);
    (event.namespace().unwrap_or_default(), event.name_any(), last)
}

/// The events to remove; pure. An event with a time in the future, from a clock that is ahead, counts as new.
fn plan(mut events: Vec<Seen>, config: &Config, now: Timestamp) -> Vec<Seen> {
    events.sort_by_key(|(_, _, at)| std::cmp::Reverse(*at));
    let keep_for = SignedDuration::try_from(config.keep_for).unwrap_or(SignedDuration::MAX);
    let is_young = |(_, _, at): &&Seen| at.is_some_and(|at| now.duration_since(at) < keep_for);
    let kept = events.iter().take(config.events_max).take_while(is_young).count();
    events.split_off(kept)
}

impl EventCollector {
    pub(crate) fn create(config: Config, client: Client) -> Self {
        Self { config, client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut resync = ResyncTicker::every(self.config.every, stop.clone());
        while resync.next().await {
            if let Some(Err(error)) = stop.run_until_cancelled(self.sweep()).await {
                tracing::warn!(%error, "cannot collect old events; will retry");
            }
        }
    }

    async fn sweep(&self) -> kube::Result<()> {
        let all: Api<Event> = Api::all(self.client.clone());
        let (mut events, mut next) = (Vec::new(), None);
        loop {
            let params = ListParams { limit: Some(500), continue_token: next, ..ListParams::default() };
            let page = all.list(&params).await?;
            events.extend(page.items.iter().map(key_and_time));
            next = page.metadata.continue_.filter(|token| !token.is_empty());
            if next.is_none() {
                break;
            }
        }
        for (namespace, name, _) in plan(events, &self.config, Timestamp::now()) {
            let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
            let result = api.delete(&name, &DeleteParams::default()).await;
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_newest_of_the_last_hour() {
        let now: Timestamp = "2026-01-01T12:00:00Z".parse().unwrap();
        let event = |name: &str, at: &str| (String::new(), name.to_owned(), at.parse().ok());
        let events = vec![
            event("a", "2026-01-01T11:59:00Z"),
            event("too old", "2026-01-01T11:00:00Z"),
            event("b", "2026-01-01T11:30:00Z"),
            event("timeless", "?"),
            event("ahead", "2026-01-01T13:00:00Z"),
        ];
        let names = |max: usize| {
            let config = Config { events_max: max, ..Config::default() };
            plan(events.clone(), &config, now).into_iter().map(|(_, name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(10), ["too old", "timeless"]);
        assert_eq!(names(2), ["b", "too old", "timeless"]);
    }
}
