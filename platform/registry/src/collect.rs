//! Garbage collection: of manifests that no tag and no other manifest references, and of contents that no manifest
//! references.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    time::Duration,
};

use jiff::Timestamp;
use mayfly_api::Digest;
use mayfly_artifacts::Removal;
use serde_json::Value;

use crate::{manifests::ManifestLinks, names::RepositoryName, store::RegistryStore};

/// The time for which a manifest without a tag is kept: pods that run it may be started again by its digest.
const UNTAGGED_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// The time for which a content without a manifest is kept: its push may be in progress.
const UNNAMED_FOR: Duration = Duration::from_secs(24 * 3600);

/// A manifest in a repository.
#[derive(Clone, Debug)]
struct KeptManifest {
    links: ManifestLinks,
    is_tagged: bool,
    since: Timestamp,
}

type Manifests = BTreeMap<(RepositoryName, Digest), KeptManifest>;

fn is_older(since: Timestamp, now: Timestamp, age: Duration) -> bool {
    Duration::try_from(now.duration_since(since)).is_ok_and(|old| old >= age)
}

/// The manifests to remove from their repositories. Pure.
fn plan(manifests: &Manifests, now: Timestamp) -> Vec<(RepositoryName, Digest)> {
    let mut kept: BTreeSet<(RepositoryName, Digest)> = BTreeSet::new();
    let roots = manifests
        .iter()
        .filter(|(_, manifest)| manifest.is_tagged || !is_older(manifest.since, now, UNTAGGED_FOR));
    let mut open: Vec<(RepositoryName, Digest)> = roots.map(|(key, _)| key.clone()).collect();
    while let Some(key) = open.pop() {
        let Some(manifest) = manifests.get(&key) else { continue };
        if !kept.insert(key.clone()) {
            continue;
        }
        let (name, digest) = key;
        open.extend(manifest.links.manifests.iter().map(|child| (name.clone(), *child)));
        // Signatures and similar manifests are kept with their subject.
        let about = manifests
            .iter()
            .filter(|((other, _), manifest)| *other == name && manifest.links.subject == Some(digest));
        open.extend(about.map(|(key, _)| key.clone()));
    }
    manifests.keys().filter(|key| !kept.contains(key)).cloned().collect()
}

/// Runs one round of the collection.
pub(crate) async fn collect(store: &RegistryStore, now: Timestamp) -> io::Result<()> {
    let named = store
        .run(move |store| {
            let _guard = store.changes.lock();
            let mut manifests = load(store)?;
            for key in plan(&manifests, now) {
                store.remove_manifest(&key.0, key.1)?;
                tracing::info!(repository = %key.0, manifest = %key.1, "removed an untagged manifest");
                manifests.remove(&key);
            }
            let mut named: BTreeSet<Digest> = manifests.keys().map(|(_, digest)| *digest).collect();
            named.extend(manifests.values().flat_map(|manifest| manifest.links.blobs.iter().copied()));
            Ok(named)
        })
        .await?;
    for content in store.contents.list().await? {
        if named.contains(&content.digest) || !is_older(content.created, now, UNNAMED_FOR) {
            continue;
        }
        // A manifest that references it meanwhile is pushed after its blobs were pushed or checked, which renewed
        // them.
        if let Removal::Quarantined(aside) =
            store.contents.quarantine(&content.digest, content.created).await?
        {
            aside.remove().await?;
        }
    }
    Ok(())
}

fn load(store: &RegistryStore) -> io::Result<Manifests> {
    let mut manifests = Manifests::new();
    for name in store.names()? {
        let tagged: BTreeSet<Digest> = store.tags(&name)?.into_iter().map(|(_, digest)| digest).collect();
        for entry in store.manifests(&name)? {
            let bytes = store.read(&entry.digest)?.unwrap_or_default();
            let manifest: Value = serde_json::from_slice(&bytes).unwrap_or_default();
            let kept = KeptManifest {
                links: ManifestLinks::of(&manifest),
                is_tagged: tagged.contains(&entry.digest),
                since: store.manifest_since(&name, entry.digest)?,
            };
            manifests.insert((name.clone(), entry.digest), kept);
        }
    }
    Ok(manifests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_tag_reaches_stays_and_so_does_what_is_young() {
        let now: Timestamp = "2026-01-31T00:00:00Z".parse().unwrap();
        let old: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let digest = |text: &str| Digest::of(text.as_bytes());
        let name = RepositoryName::parse("a").unwrap();
        let manifest = |is_tagged, since, children: &[&str], subject: Option<&str>| KeptManifest {
            links: ManifestLinks {
                blobs: vec![],
                manifests: children.iter().map(|child| digest(child)).collect(),
                subject: subject.map(digest),
            },
            is_tagged,
            since,
        };
        let manifests: Manifests = [
            ("index", manifest(true, old, &["variant"], None)),
            ("variant", manifest(false, old, &[], None)),
            ("signature", manifest(false, old, &[], Some("variant"))),
            ("young", manifest(false, now, &[], None)),
            ("left", manifest(false, old, &[], None)),
            ("signature of left", manifest(false, old, &[], Some("left"))),
        ]
        .map(|(text, manifest)| ((name.clone(), digest(text)), manifest))
        .into();
        let removed: BTreeSet<_> = plan(&manifests, now).into_iter().map(|(_, digest)| digest).collect();
        assert_eq!(removed, ["left", "signature of left"].map(digest).into());
    }
}
