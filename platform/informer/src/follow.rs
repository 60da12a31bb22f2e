//! Listing and watching one kind, through outages.

use std::{fmt, time::Duration};

use futures::StreamExt as _;
use kube::{
    Api, Resource,
    runtime::watcher::{self, Event},
};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::{Backoff, WatchConfig};

/// Pauses between tries to reach the API.
const RETRY: Backoff = Backoff { first: Duration::from_millis(50), most: Duration::from_secs(5) };

/// Lists, then watches, and calls `on_event`, until `stop`. Never gives up: retries during an outage, and lists again
/// when the API no longer has the history (`Init`, `InitApply`…, `InitDone`).
pub async fn follow<K>(
    api: Api<K>,
    config: WatchConfig,
    stop: CancellationToken,
    mut on_event: impl FnMut(Event<K>),
) where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    let url = api.resource_url().to_owned();
    let mut failures = 0;
    loop {
        let mut events = std::pin::pin!(watcher::watcher(api.clone(), config.clone()));
        let mut expired = false;
        while !expired {
            let event = tokio::select! {
                () = stop.cancelled() => return,
                event = events.next() => event,
            };
            match event {
                None => break,
                Some(Ok(event)) => {
                    // `Init` starts a list, perhaps while the API is unreachable: only a response ends a series of
                    // failures.
                    if !matches!(event, Event::Init) {
                        failures = 0;
                    }
                    on_event(event);
                }
                Some(Err(error)) => {
                    failures += 1;
                    expired = is_expired(&error);
                    tell(&url, &error, failures);
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = tokio::time::sleep(RETRY.pause(failures)) => {}
                    }
                }
            }
        }
    }
}

/// A watch that is refused with 410: the watcher would try the same revision again for ever.
fn is_expired(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 410)
}

fn tell(url: &str, error: &watcher::Error, failures: u32) {
    if failures == 1 {
        tracing::info!(url, %error, "lost the watch; trying again");
    } else {
        tracing::debug!(url, %error, failures, "cannot list or watch; trying again");
    }
}
