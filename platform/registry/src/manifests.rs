//! Manifests: stored unchanged, by digest and by tag; and their referrers.

use axum::{
    body::{Body, Bytes},
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use mayfly_api::Digest;
use serde_json::{Value, json};

use crate::{
    error::{RegistryRefusal, refusal},
    names::{ManifestReference, RepositoryName},
    server::{RegistryQuery, RegistryServer, headers_of},
    store::{ManifestEntry, RegistryStore},
};

/// Largest manifest, in bytes (distribution-spec: 4 MiB at least).
const MANIFEST_BYTES_MAX: usize = 4 << 20;
const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";

/// The references of a manifest. Pure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ManifestLinks {
    /// Its configuration and layers: blobs.
    pub(crate) blobs: Vec<Digest>,
    /// The manifests of an index.
    pub(crate) manifests: Vec<Digest>,
    /// The manifest that this one refers to, such as the image of a signature.
    pub(crate) subject: Option<Digest>,
}

impl ManifestLinks {
    pub(crate) fn of(manifest: &Value) -> Self {
        let digest = |part: &Value| part["digest"].as_str().and_then(|text| text.parse().ok());
        let list = |name: &str| manifest[name].as_array().into_iter().flatten();
        // Layers with addresses of their own are stored elsewhere, and never pushed.
        let here = |part: &&Value| part["urls"].as_array().is_none_or(|urls| urls.is_empty());
        let layers = list("layers").chain(list("blobs")).filter(here);
        Self {
            blobs: std::iter::once(&manifest["config"]).chain(layers).filter_map(digest).collect(),
            manifests: list("manifests").filter_map(digest).collect(),
            subject: digest(&manifest["subject"]),
        }
    }
}

impl RegistryServer {
    pub(crate) async fn manifest(
        &self,
        method: &Method,
        name: &RepositoryName,
        reference: &ManifestReference,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Response, RegistryRefusal> {
        match *method {
            Method::GET | Method::HEAD => {
                let (entry, bytes) = self.find(name, reference).await?;
                let length = bytes.len();
                let body = if *method == Method::GET { Body::from(bytes) } else { Body::empty() };
                let mut response = body.into_response();
                let answer = response.headers_mut();
                answer.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
                headers_of(
                    answer,
                    &[
                        ("content-type", entry.media_type),
                        ("docker-content-digest", entry.digest.to_string()),
                    ],
                );
                Ok(response)
            }
            Method::PUT => self.put_manifest(name, reference, headers, body).await,
            Method::DELETE => {
                let (name, reference) = (name.clone(), reference.clone());
                let text = text_of(&reference);
                let removed = self
                    .store
                    .run(move |store| match &reference {
                        ManifestReference::Tag(tag) => store.remove_tag(&name, tag),
                        ManifestReference::Digest(digest) => store.remove_manifest(&name, *digest),
                    })
                    .await?;
                match removed {
                    true => Ok(StatusCode::ACCEPTED.into_response()),
                    false => Err(RegistryRefusal::manifest_unknown(&text)),
                }
            }
            _ => Err(RegistryRefusal::unsupported()),
        }
    }

    async fn find(
        &self,
        name: &RepositoryName,
        reference: &ManifestReference,
    ) -> Result<(ManifestEntry, Vec<u8>), RegistryRefusal> {
        let (wanted, by) = (name.clone(), reference.clone());
        let found = self
            .store
            .run(move |store| {
                let digest = match by {
                    ManifestReference::Tag(tag) => store.tag(&wanted, &tag)?,
                    ManifestReference::Digest(digest) => Some(digest),
                };
                let Some(digest) = digest else { return Ok(None) };
                let Some(entry) = store.manifest(&wanted, digest)? else { return Ok(None) };
                Ok(store.read(&digest)?.map(|bytes| (entry, bytes)))
            })
            .await?;
        found.ok_or_else(|| RegistryRefusal::manifest_unknown(&text_of(reference)))
    }

    async fn put_manifest(
        &self,
        name: &RepositoryName,
        reference: &ManifestReference,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Response, RegistryRefusal> {
        let invalid =
            |why: String| refusal(StatusCode::BAD_REQUEST, "MANIFEST_INVALID", format!("the manifest {why}"));
        let bytes = axum::body::to_bytes(body, MANIFEST_BYTES_MAX).await.map_err(|_| {
            let message = format!("a manifest has {MANIFEST_BYTES_MAX} bytes at most");
            refusal(StatusCode::PAYLOAD_TOO_LARGE, "MANIFEST_INVALID", message)
        })?;
        let digest = Digest::of(&bytes);
        if let ManifestReference::Digest(named) = reference
            && *named != digest
        {
            return Err(RegistryRefusal::digest_invalid(&named.to_string()));
        }
        let manifest: Value =
            serde_json::from_slice(&bytes).map_err(|error| invalid(format!("is not JSON: {error}")))?;
        let by_header = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let stated = manifest["mediaType"].as_str();
        if let (Some(stated), Some(by_header)) = (stated, by_header)
            && stated != by_header
        {
            return Err(invalid(format!("states the media type {stated}, and its header {by_header}")));
        }
        let media_type = stated.or(by_header).ok_or_else(|| invalid("has no media type".into()))?.to_owned();
        let links = ManifestLinks::of(&manifest);
        let entry = ManifestEntry { digest, media_type };
        self.keep(name, &entry, &links, reference, bytes).await?;
        let mut response = StatusCode::CREATED.into_response();
        let answer = response.headers_mut();
        headers_of(
            answer,
            &[
                ("location", format!("/v2/{name}/manifests/{digest}")),
                ("docker-content-digest", digest.to_string()),
            ],
        );
        if let Some(subject) = links.subject {
            headers_of(answer, &[("oci-subject", subject.to_string())]);
        }
        Ok(response)
    }

    /// Stores a manifest whose parts are present. Excludes the collection between the check and the write.
    async fn keep(
        &self,
        name: &RepositoryName,
        entry: &ManifestEntry,
        links: &ManifestLinks,
        reference: &ManifestReference,
        bytes: Bytes,
    ) -> Result<(), RegistryRefusal> {
        let limit = MANIFEST_BYTES_MAX as u64;
        let content = futures::stream::once(std::future::ready(Ok::<_, std::io::Error>(bytes)));
        self.store.contents.upload(Some(entry.digest), limit, content).await?;
        let tag = match reference {
            ManifestReference::Tag(tag) => Some(tag.clone()),
            ManifestReference::Digest(_) => None,
        };
        let (name, entry, links) = (name.clone(), entry.clone(), links.clone());
        let missing = self
            .store
            .run(move |store| {
                let _guard = store.changes.lock();
                for digest in &links.manifests {
                    if store.manifest(&name, *digest)?.is_none() {
                        return Ok(Some(*digest));
                    }
                }
                if let Some(digest) = links.blobs.iter().find(|digest| store.contents.path(digest).is_none())
                {
                    return Ok(Some(*digest));
                }
                store.add_manifest(&name, &entry, tag.as_deref())?;
                Ok(None)
            })
            .await?;
        match missing {
            None => Ok(()),
            Some(digest) => {
                let message = format!("the manifest names {digest}, which was not pushed");
                Err(refusal(StatusCode::NOT_FOUND, "MANIFEST_BLOB_UNKNOWN", message))
            }
        }
    }

    /// The manifests whose subject is this one, as an index.
    pub(crate) async fn referrers(
        &self,
        name: &RepositoryName,
        subject: Digest,
        query: &RegistryQuery,
    ) -> Result<Response, RegistryRefusal> {
        let name = name.clone();
        let mut about = self.store.run(move |store| referrers(store, &name, subject)).await?;
        if let Some(wanted) = &query.artifact_type {
            about.retain(|entry| entry["artifactType"].as_str() == Some(wanted));
        }
        let index = json!({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": about});
        let mut response = index.to_string().into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(INDEX_TYPE));
        if query.artifact_type.is_some() {
            headers_of(response.headers_mut(), &[("oci-filters-applied", "artifactType".into())]);
        }
        Ok(response)
    }
}

fn referrers(store: &RegistryStore, name: &RepositoryName, subject: Digest) -> std::io::Result<Vec<Value>> {
    let mut about = Vec::new();
    for entry in store.manifests(name)? {
        let Some(bytes) = store.read(&entry.digest)? else { continue };
        let Ok(manifest) = serde_json::from_slice::<Value>(&bytes) else { continue };
        if ManifestLinks::of(&manifest).subject != Some(subject) {
            continue;
        }
        let kind = manifest["artifactType"].as_str().or(manifest["config"]["mediaType"].as_str());
        let mut descriptor = json!({"mediaType": entry.media_type, "digest": entry.digest.to_string(),
            "size": bytes.len()});
        if let Some(kind) = kind {
            descriptor["artifactType"] = kind.into();
        }
        if manifest["annotations"].is_object() {
            descriptor["annotations"] = manifest["annotations"].clone();
        }
        about.push(descriptor);
    }
    Ok(about)
}

fn text_of(reference: &ManifestReference) -> String {
    match reference {
        ManifestReference::Tag(tag) => tag.clone(),
        ManifestReference::Digest(digest) => digest.to_string(),
    }
}
