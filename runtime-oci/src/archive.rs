//! Reads archives of images (tar): OCI layouts and the format of `docker save`.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{self, Read, Seek as _, SeekFrom},
    path::{Component, Path, PathBuf},
};

use oci_spec::image::{Descriptor, ImageIndex};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest as _, Sha256};

/// Largest manifest or index, in bytes (containerd's limit is 8 MiB).
const DOCUMENT_BYTES_MAX: u64 = 8 << 20;
/// Most files in an archive: an image has some dozens.
const FILES_MAX: usize = 100_000;
/// The annotations by which an archive names its images; the first is the more complete one.
const NAME_ANNOTATIONS: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";

/// Why an archive cannot be imported. Shown to users.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveError {
    #[error("cannot read the archive: {0}")]
    Io(#[from] io::Error),
    #[error("the archive is not an image: {0}")]
    Form(String),
}

/// The position of a file in the archive.
#[derive(Clone, Copy, Debug)]
struct Extent {
    offset: u64,
    bytes: u64,
}

/// A part of an image.
#[derive(Clone, Debug)]
pub(crate) enum Blob {
    /// A byte range of the archive.
    Stored { offset: u64, bytes: u64 },
    /// A generated document.
    Generated(Vec<u8>),
}

impl Blob {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Stored { bytes, .. } => *bytes,
            Self::Generated(document) => document.len() as u64,
        }
    }
}

/// An image in the archive: its names, and what they point to.
#[derive(Clone, Debug)]
pub(crate) struct ArchivedImage {
    pub(crate) names: Vec<String>,
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) bytes: u64,
}

/// An opened archive.
pub(crate) struct Archive {
    file: File,
    files: HashMap<PathBuf, Extent>,
    links: HashMap<PathBuf, PathBuf>,
    /// The blobs by digest.
    pub(crate) blobs: BTreeMap<String, Blob>,
    pub(crate) images: Vec<ArchivedImage>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerEntry {
    config: PathBuf,
    repo_tags: Option<Vec<String>>,
    layers: Vec<PathBuf>,
}

impl Archive {
    /// Indexes the archive's files and reads its manifests. Blocks.
    pub(crate) fn open(path: &Path) -> Result<Self, ArchiveError> {
        let mut file = File::open(path)?;
        refuse_compressed(&mut file)?;
        let mut archive = Self {
            file: file.try_clone()?,
            files: HashMap::new(),
            links: HashMap::new(),
            blobs: BTreeMap::new(),
            images: Vec::new(),
        };
        archive.index(file)?;
        archive.read_layout()?;
        if archive.images.is_empty() {
            archive.read_docker()?;
        }
        Ok(archive)
    }

    fn index(&mut self, file: File) -> Result<(), ArchiveError> {
        let mut tar = tar::Archive::new(file);
        for entry in tar.entries_with_seek()? {
            let entry = entry?;
            let Some(path) = normal(&entry.path()?) else { continue };
            if self.files.len() + self.links.len() > FILES_MAX {
                return Err(ArchiveError::Form(format!("it has more than {FILES_MAX} files")));
            }
            match entry.header().entry_type() {
                kind if kind.is_file() => {
                    let extent = Extent { offset: entry.raw_file_position(), bytes: entry.size() };
                    self.files.insert(path, extent);
                }
                kind if kind.is_symlink() || kind.is_hard_link() => {
                    let Some(target) = entry.link_name()? else { continue };
                    let folder = if kind.is_symlink() { path.parent().map(Path::to_owned) } else { None };
                    let target = folder.unwrap_or_default().join(target);
                    self.links.extend(normal(&target).map(|target| (path, target)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn extent(&self, path: &Path) -> Option<Extent> {
        let path = normal(path)?;
        // Follows one link: `docker save` links to a layer that several images share.
        self.files.get(&path).or_else(|| self.files.get(self.links.get(&path)?)).copied()
    }

    fn document(&mut self, extent: Extent) -> Result<Vec<u8>, ArchiveError> {
        if extent.bytes > DOCUMENT_BYTES_MAX {
            return Err(ArchiveError::Form("a manifest is too large".into()));
        }
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(extent.offset))?;
        (&self.file).take(extent.bytes).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads the `index.json` of an OCI layout. An index without names is ignored, so that the other format is tried.
    fn read_layout(&mut self) -> Result<(), ArchiveError> {
        let Some(extent) = self.extent(Path::new("index.json")) else { return Ok(()) };
        let text = self.document(extent)?;
        let index: ImageIndex = serde_json::from_slice(&text)
            .map_err(|error| ArchiveError::Form(format!("index.json: {error}")))?;
        for descriptor in index.manifests() {
            let names: Vec<String> = name_of(descriptor).into_iter().collect();
            if !names.is_empty() {
                self.images.push(ArchivedImage {
                    names,
                    media_type: descriptor.media_type().to_string(),
                    digest: descriptor.digest().to_string(),
                    bytes: descriptor.size(),
                });
            }
        }
        let blobs = self.files.iter().filter_map(|(path, extent)| {
            let hex = path.strip_prefix("blobs/sha256").ok()?.to_str()?;
            Some((format!("sha256:{hex}"), Blob::Stored { offset: extent.offset, bytes: extent.bytes }))
        });
        self.blobs.extend(blobs);
        Ok(())
    }

    /// Reads the `manifest.json` of `docker save`, and generates an OCI-compatible manifest.
    fn read_docker(&mut self) -> Result<(), ArchiveError> {
        let Some(extent) = self.extent(Path::new("manifest.json")) else {
            let why = "it has neither an index.json that names an image nor a manifest.json";
            return Err(ArchiveError::Form(why.into()));
        };
        let text = self.document(extent)?;
        let entries: Vec<DockerEntry> = serde_json::from_slice(&text)
            .map_err(|error| ArchiveError::Form(format!("manifest.json: {error}")))?;
        for entry in entries {
            let config = self.add(&entry.config)?;
            let mut layers = Vec::new();
            for layer in &entry.layers {
                let (digest, bytes, compressed) = self.add(layer)?;
                let media_type =
                    if compressed { format!("{DOCKER_LAYER}.gzip") } else { DOCKER_LAYER.into() };
                layers.push(json!({"mediaType": media_type, "size": bytes, "digest": digest}));
            }
            let manifest = json!({
                "schemaVersion": 2,
                "mediaType": DOCKER_MANIFEST,
                "config": {"mediaType": DOCKER_CONFIG, "size": config.1, "digest": config.0},
                "layers": layers,
            });
            let document = manifest.to_string().into_bytes();
            let digest = format!("sha256:{}", hex::encode(Sha256::digest(&document)));
            let names = entry.repo_tags.unwrap_or_default();
            if names.is_empty() {
                return Err(ArchiveError::Form(
                    "an image in it has no name: save it with name and tag".into(),
                ));
            }
            let bytes = document.len() as u64;
            self.images.push(ArchivedImage {
                names,
                media_type: DOCKER_MANIFEST.into(),
                digest: digest.clone(),
                bytes,
            });
            self.blobs.insert(digest, Blob::Generated(document));
        }
        Ok(())
    }

    /// Adds a file as a blob; returns its digest, its size in bytes, and whether it is compressed.
    fn add(&mut self, path: &Path) -> Result<(String, u64, bool), ArchiveError> {
        let extent = self
            .extent(path)
            .ok_or_else(|| ArchiveError::Form(format!("{} is not in it", path.display())))?;
        self.file.seek(SeekFrom::Start(extent.offset))?;
        let mut reader = (&self.file).take(extent.bytes);
        let (mut hash, mut buffer, mut magic) = (Sha256::new(), vec![0; 1 << 16], None);
        loop {
            let read = reader.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            magic.get_or_insert_with(|| buffer[..read.min(2)].to_vec());
            hash.update(&buffer[..read]);
        }
        let digest = format!("sha256:{}", hex::encode(hash.finalize()));
        let blob = Blob::Stored { offset: extent.offset, bytes: extent.bytes };
        self.blobs.insert(digest.clone(), blob);
        Ok((digest, extent.bytes, magic.as_deref() == Some(&GZIP_MAGIC)))
    }

    /// A reader of a blob's bytes. Blocks.
    pub(crate) fn reader(&self, blob: &Blob) -> io::Result<Box<dyn Read + Send>> {
        Ok(match blob {
            Blob::Generated(document) => Box::new(io::Cursor::new(document.clone())),
            Blob::Stored { offset, bytes } => {
                let mut file = self.file.try_clone()?;
                file.seek(SeekFrom::Start(*offset))?;
                Box::new(file.take(*bytes))
            }
        })
    }
}

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

fn refuse_compressed(file: &mut File) -> Result<(), ArchiveError> {
    let mut magic = [0; 2];
    let read = file.read(&mut magic)?;
    file.seek(SeekFrom::Start(0))?;
    match read == 2 && magic == GZIP_MAGIC {
        true => Err(ArchiveError::Form("it is compressed: unpack it with gunzip first".into())),
        false => Ok(()),
    }
}

/// The path without `.` components; `None` if it leads out of the archive.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => normal.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop().then_some(())?;
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(normal)
}

fn name_of(descriptor: &Descriptor) -> Option<String> {
    let annotations = descriptor.annotations().as_ref()?;
    NAME_ANNOTATIONS.iter().find_map(|name| annotations.get(*name)).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(files: &[(&str, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut tar = tar::Builder::new(file.reopen().unwrap());
        for (path, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_cksum();
            tar.append_data(&mut header, path, *content).unwrap();
        }
        tar.finish().unwrap();
        file
    }

    fn read(archive: &Archive, digest: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        archive.reader(&archive.blobs[digest]).unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_docker_archive_gets_a_manifest() {
        let entries = br#"[{"Config":"c.json","RepoTags":["busybox:local"],"Layers":["a/layer.tar"]}]"#;
        let file = archive(&[("c.json", b"{}"), ("a/layer.tar", b"layer"), ("manifest.json", entries)]);
        let archive = Archive::open(file.path()).unwrap();
        assert_eq!(archive.images[0].names, ["busybox:local"]);
        let manifest: serde_json::Value =
            serde_json::from_slice(&read(&archive, &archive.images[0].digest)).unwrap();
        let layer = manifest["layers"][0]["digest"].as_str().unwrap();
        assert_eq!(read(&archive, layer), b"layer");
        assert_eq!(manifest["layers"][0]["mediaType"], DOCKER_LAYER);
        assert_eq!(read(&archive, manifest["config"]["digest"].as_str().unwrap()), b"{}");
    }

    #[test]
    fn an_oci_layout_names_its_images_by_annotation() {
        let hex = hex::encode(Sha256::digest(b"{}"));
        let index = json!({"schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 2,
            "digest": format!("sha256:{hex}"),
            "annotations": {"io.containerd.image.name": "docker.io/library/x:1",
                "org.opencontainers.image.ref.name": "1"}}]});
        let blob = format!("blobs/sha256/{hex}");
        let file = archive(&[("index.json", index.to_string().as_bytes()), (&blob, b"{}")]);
        let archive = Archive::open(file.path()).unwrap();
        assert_eq!(archive.images[0].names, ["docker.io/library/x:1"]);
        assert_eq!(read(&archive, &archive.images[0].digest), b"{}");
    }

    #[test]
    fn an_archive_without_an_image_is_rejected() {
        for (files, reason) in [
            (vec![("x", &b"y"[..])], "neither"),
            (vec![("manifest.json", b"{")], "manifest.json"),
            (vec![("manifest.json", br#"[{"Config":"../c","RepoTags":["a:1"],"Layers":[]}]"#)], "not in it"),
        ] {
            let file = archive(&files);
            let error = Archive::open(file.path()).err().unwrap().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0x1f, 0x8b, 8, 0]).unwrap();
        assert!(Archive::open(file.path()).err().unwrap().to_string().contains("gunzip"));
    }
}
