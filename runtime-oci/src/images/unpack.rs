//! Unpacks layers into snapshots.

use containerd_client::{
    services::v1::{
        ApplyRequest,
        snapshots::{
            CommitSnapshotRequest, PrepareSnapshotRequest, RemoveSnapshotRequest, StatSnapshotRequest,
        },
    },
    tonic::Code,
    types::Descriptor,
};
use mayfly_runtime::RuntimeError;
use oci_spec::image::{ImageConfiguration, ImageManifest};
use sha2::{Digest as _, Sha256};

use super::content::Lease;
use crate::client::{Containerd, SNAPSHOTTER, failed, leased, or_absent, request};

/// The snapshot name of each layer, which depends on all layers below it (`image-spec/config.md`, ChainID).
fn chain_ids(diff_ids: &[String]) -> Vec<String> {
    let mut chain: Vec<String> = Vec::new();
    for diff in diff_ids {
        let next = match chain.last() {
            None => diff.clone(),
            Some(below) => format!("sha256:{}", hex::encode(Sha256::digest(format!("{below} {diff}")))),
        };
        chain.push(next);
    }
    chain
}

/// Creates the missing snapshots of the layers; returns the name of the topmost one.
pub(super) async fn unpack(
    client: &Containerd,
    manifest: &ImageManifest,
    config: &ImageConfiguration,
    lease: &Lease,
) -> Result<String, RuntimeError> {
    let diff_ids: Vec<String> = config.rootfs().diff_ids().iter().map(ToString::to_string).collect();
    if diff_ids.len() != manifest.layers().len() {
        return Err(RuntimeError::Invalid(
            "the image's manifest and configuration name different layers".into(),
        ));
    }
    let mut parent = String::new();
    for ((chain, layer), diff) in chain_ids(&diff_ids).into_iter().zip(manifest.layers()).zip(&diff_ids) {
        let stat = StatSnapshotRequest { snapshotter: SNAPSHOTTER.into(), key: chain.clone() };
        let known =
            or_absent(client.snapshots().stat(request(stat)).await).map_err(failed("look up a snapshot"))?;
        if known.is_none() {
            apply(client, layer, diff, &chain, &parent, lease).await?;
        }
        parent = chain;
    }
    Ok(parent)
}

async fn apply(
    client: &Containerd,
    layer: &oci_spec::image::Descriptor,
    diff: &str,
    chain: &str,
    parent: &str,
    lease: &Lease,
) -> Result<(), RuntimeError> {
    let key = format!("extract-{} {chain}", lease.id);
    let prepare = PrepareSnapshotRequest {
        snapshotter: SNAPSHOTTER.into(),
        key: key.clone(),
        parent: parent.into(),
        ..PrepareSnapshotRequest::default()
    };
    let prepared = client.snapshots().prepare(leased(prepare, &lease.id)).await;
    let mounts = prepared.map_err(failed("prepare a snapshot"))?.into_inner().mounts;
    let descriptor = Descriptor {
        media_type: layer.media_type().to_string(),
        digest: layer.digest().to_string(),
        size: i64::try_from(layer.size()).unwrap_or(i64::MAX),
        ..Descriptor::default()
    };
    let message = ApplyRequest { diff: Some(descriptor), mounts, ..ApplyRequest::default() };
    let applied = client.diff().apply(leased(message, &lease.id)).await;
    let checked = applied.map_err(failed("unpack a layer")).and_then(|answer| {
        let found = answer.into_inner().applied.map(|applied| applied.digest).unwrap_or_default();
        match found == diff {
            true => Ok(()),
            false => Err(RuntimeError::Invalid(format!(
                "a layer has the digest {found}, but the image lists {diff}"
            ))),
        }
    });
    let committed = match checked {
        Ok(()) => {
            let commit = CommitSnapshotRequest {
                snapshotter: SNAPSHOTTER.into(),
                name: chain.into(),
                key: key.clone(),
                ..CommitSnapshotRequest::default()
            };
            match client.snapshots().commit(leased(commit, &lease.id)).await {
                // A concurrent start has unpacked the same layer.
                Err(status) if status.code() == Code::AlreadyExists => Err(None),
                result => result.map(|_| ()).map_err(|status| Some(failed("keep a layer")(status))),
            }
        }
        Err(error) => Err(Some(error)),
    };
    let Err(error) = committed else { return Ok(()) };
    let remove = RemoveSnapshotRequest { snapshotter: SNAPSHOTTER.into(), key };
    let _ = client.snapshots().remove(request(remove)).await;
    error.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the image specification, recomputed.
    #[test]
    fn chains_of_layers() {
        let diffs = ["sha256:a".to_owned(), "sha256:b".to_owned()];
        let chain = chain_ids(&diffs);
        assert_eq!(chain[0], "sha256:a");
        assert_eq!(chain[1], format!("sha256:{}", hex::encode(Sha256::digest("sha256:a sha256:b"))));
        assert!(chain_ids(&[]).is_empty());
    }
}
