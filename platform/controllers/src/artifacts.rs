//! Removes components and archives of files that no Function and no Revision references from the artifact store. The
//! API server refuses the removal of artifacts that a job, a pod, a workflow or an open execution references.

use std::{collections::HashSet, time::Duration};

use http::{Request, header};
use kube::Client;
use mayfly_api::{
    Digest, Function, Revision,
    k8s::jiff::{Timestamp, fmt::rfc2822::DateTimePrinter},
};
use mayfly_informer::{Change, Informer, Informers};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::resync::ResyncTicker;

/// The capacity of the queue of digests that an object no longer references.
const UNNAMED_MAX: usize = 4096;

/// The settings of the artifact collector.
#[derive(Clone, Debug)]
pub struct Config {
    /// The interval of its rounds.
    pub every: Duration,
    /// The time that an unreferenced upload is kept for a function to reference it, and that a component is kept
    /// after its last function or revision.
    pub grace: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self { every: Duration::from_secs(600), grace: Duration::from_secs(3600) }
    }
}

/// Removes artifacts that no object references.
pub(crate) struct ArtifactCollector {
    config: Config,
    client: Client,
    functions: Informer<Function>,
    revisions: Informer<Revision>,
    /// Digests that an object referenced until its change.
    unnamed: mpsc::Receiver<Digest>,
}

#[derive(Deserialize)]
struct ArtifactList {
    items: Vec<Artifact>,
}

#[derive(Clone, Debug, Deserialize)]
struct Artifact {
    digest: Digest,
    created: Timestamp,
}

/// The component of a function, and the archive of its files.
fn named_by_function(function: &Function) -> Vec<Digest> {
    function.spec.source.component.into_iter().chain(function.spec.files).collect()
}

fn named_by_revision(revision: &Revision) -> Vec<Digest> {
    revision.spec.source.component.into_iter().chain(revision.spec.files).collect()
}

/// Queues the artifacts that an object referenced before a change, and does not any more.
fn no_longer_named<K>(
    change: &Change<'_, K>,
    named_by: impl Fn(&K) -> Vec<Digest>,
    tell: &mpsc::Sender<Digest>,
) {
    let no_longer = match change {
        Change::Added(_) => Vec::new(),
        Change::Updated { old, new } => {
            let still = named_by(new);
            named_by(old).into_iter().filter(|digest| !still.contains(digest)).collect()
        }
        Change::Deleted(old) => named_by(old),
    };
    for digest in no_longer {
        // If the queue is full, the artifact's age is not reset.
        let _ = tell.try_send(digest);
    }
}

/// The artifacts to remove: pure.
fn plan(artifacts: &[Artifact], named: &HashSet<Digest>, grace: Duration, now: Timestamp) -> Vec<Artifact> {
    let old = |artifact: &&Artifact| {
        Duration::try_from(now.duration_since(artifact.created)).is_ok_and(|age| age >= grace)
    };
    let unnamed = artifacts.iter().filter(|artifact| !named.contains(&artifact.digest));
    unnamed.filter(old).cloned().collect()
}

/// Removes the listed artifact, unless it was uploaded again since: an object is about to reference it.
fn removal(artifact: &Artifact) -> kube::Result<Request<Vec<u8>>> {
    let listed = DateTimePrinter::new().timestamp_to_rfc9110_string(&artifact.created);
    let listed = listed.map_err(|error| kube::Error::Service(error.into()))?;
    let request = Request::delete(format!("/artifacts/{}", artifact.digest));
    let request = request.header(header::IF_UNMODIFIED_SINCE, listed);
    request.body(Vec::new()).map_err(kube::Error::HttpError)
}

impl ArtifactCollector {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let (functions, revisions) = (informers.of::<Function>(), informers.of::<Revision>());
        let (tell, unnamed) = mpsc::channel(UNNAMED_MAX);
        let told = tell.clone();
        functions.handle(move |change: Change<'_, Function>| {
            no_longer_named(&change, named_by_function, &told);
        });
        revisions.handle(move |change: Change<'_, Revision>| {
            no_longer_named(&change, named_by_revision, &tell);
        });
        Self { config, client, functions, revisions, unnamed }
    }

    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let synced = async {
            self.functions.synced().await;
            self.revisions.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let mut resync = ResyncTicker::every(self.config.every, stop.clone());
        loop {
            let result = tokio::select! {
                biased;
                Some(digest) = self.unnamed.recv() => self.renew(digest).await,
                more = resync.next() => match more {
                    true => self.sweep().await,
                    false => return,
                },
            };
            if let Err(error) = result {
                tracing::warn!(%error, "cannot collect unreferenced artifacts; will retry");
            }
        }
    }

    /// Restarts the artifact's grace period.
    async fn renew(&self, digest: Digest) -> kube::Result<()> {
        let request = Request::post(format!("/artifacts/{digest}")).body(Vec::new());
        match self.client.request_text(request.map_err(kube::Error::HttpError)?).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            result => result.map(|_| ()),
        }
    }

    async fn sweep(&self) -> kube::Result<()> {
        let request = Request::get("/artifacts").body(Vec::new()).map_err(kube::Error::HttpError)?;
        let list: ArtifactList = self.client.request(request).await?;
        for artifact in plan(&list.items, &self.named_components(), self.config.grace, Timestamp::now()) {
            let digest = artifact.digest;
            match self.client.request_text(removal(&artifact)?).await {
                Ok(_) => {
                    tracing::info!(%digest, "removed an artifact that no function or revision references")
                }
                // Referenced, uploaded or removed since: the API decides by the newest state.
                Err(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn named_components(&self) -> HashSet<Digest> {
        let functions = self.functions.list().into_iter().flat_map(|function| named_by_function(&function));
        let revisions = self.revisions.list().into_iter().flat_map(|revision| named_by_revision(&revision));
        functions.chain(revisions).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_old_and_unnamed_ones_only() {
        let now: Timestamp = "2026-01-01T12:00:00Z".parse().unwrap();
        let artifact = |text: &str, created: &str| Artifact {
            digest: Digest::of(text.as_bytes()),
            created: created.parse().unwrap(),
        };
        let artifacts = [
            artifact("named", "2026-01-01T00:00:00Z"),
            artifact("fresh", "2026-01-01T11:00:01Z"),
            artifact("future", "2026-01-01T13:00:00Z"),
            artifact("old", "2026-01-01T11:00:00Z"),
        ];
        let named = [Digest::of(b"named")].into();
        let planned = plan(&artifacts, &named, Duration::from_secs(3600), now);
        assert_eq!(planned.iter().map(|artifact| artifact.digest).collect::<Vec<_>>(), [Digest::of(b"old")]);
        let request = removal(&planned[0]).unwrap();
        assert_eq!(request.headers()["if-unmodified-since"], "Thu, 01 Jan 2026 11:00:00 GMT");
    }
}
