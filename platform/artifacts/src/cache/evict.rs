//! Eviction: above the size limit, the least recently used contents that are not pinned leave the cache.

use std::{collections::HashMap, fs, io};

use jiff::Timestamp;
use mayfly_api::Digest;

use super::{ContentUse, OriginCache};
use crate::{
    artifacts::{ArtifactInfo, Artifacts},
    files::{self, blocking},
};

/// A content that could be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Evictable {
    digest: Digest,
    /// With what was derived from it.
    bytes: u64,
    used: Timestamp,
}

/// The contents to evict so that the rest, of `total` bytes now, has at most `target` bytes: the least recently used
/// ones first. Pure.
fn plan(mut evictable: Vec<Evictable>, total: u64, target: u64) -> Vec<Digest> {
    evictable.sort_by_key(|content| (content.used, content.digest));
    let mut rest = total;
    let chosen = evictable.into_iter().take_while(|content| {
        let is_needed = rest > target;
        rest = rest.saturating_sub(content.bytes);
        is_needed
    });
    chosen.map(|content| content.digest).collect()
}

impl Artifacts {
    /// Evicts contents if the cache exceeds its limit; returns the number of evicted contents. Called after each
    /// fetch and upload. A store that is no cache stays as it is.
    pub async fn evict(&self) -> io::Result<usize> {
        let Some(cache) = self.cache() else { return Ok(0) };
        let max = cache.config.bytes_max;
        // A tenth less, so that the next content does not evict again.
        self.evict_to(move |total| if total > max { max - max / 10 } else { total }).await
    }

    /// Makes space on a full disk; returns whether a retry makes sense.
    pub(crate) async fn evict_half(&self) -> bool {
        match self.evict_to(|total| total / 2).await {
            Ok(evicted) => evicted > 0,
            Err(error) => {
                tracing::warn!(%error, "cannot evict artifacts from the cache, whose disk is full");
                false
            }
        }
    }

    /// An error is only logged: the content that was just stored is there.
    pub(crate) async fn evict_excess(&self) {
        if let Err(error) = self.evict().await {
            tracing::warn!(%error, "cannot evict artifacts from the cache");
        }
    }

    async fn evict_to(&self, target: impl FnOnce(u64) -> u64 + Send + 'static) -> io::Result<usize> {
        let artifacts = self.clone();
        blocking(move || {
            let Some(cache) = artifacts.cache() else { return Ok(0) };
            let (evictable, total) = artifacts.evictable(cache)?;
            let mut evicted = 0;
            for digest in plan(evictable, total, target(total)) {
                evicted += usize::from(artifacts.evict_one(cache, &digest)?);
            }
            if evicted > 0 {
                tracing::info!(evicted, bytes_before = total, "evicted artifacts from the cache");
            }
            Ok(evicted)
        })
        .await
    }

    /// The contents without pins, and the bytes of all contents with what was derived from them.
    fn evictable(&self, cache: &OriginCache) -> io::Result<(Vec<Evictable>, u64)> {
        let contents = self.list_now()?;
        let derived = self.derived_bytes()?;
        let uses = cache.uses_of(&contents);
        let mut total = 0u64;
        let mut evictable = Vec::new();
        for ArtifactInfo { digest, bytes, created } in contents {
            // The files of an archive have about its size; counting them would take long.
            let unpacked = if self.is_unpacked(&digest) { bytes } else { 0 };
            let bytes = bytes + unpacked + derived.get(&digest).copied().unwrap_or_default();
            total = total.saturating_add(bytes);
            match uses.get(&digest) {
                Some(content) if content.pins > 0 => {}
                content => {
                    let used = content.map_or(created, |content| content.last.max(created));
                    evictable.push(Evictable { digest, bytes, used });
                }
            }
        }
        Ok((evictable, total))
    }

    /// Removes a content unless it was pinned meanwhile; returns whether it did.
    fn evict_one(&self, cache: &OriginCache, digest: &Digest) -> io::Result<bool> {
        let _guard = self.changes.lock();
        let (content, unpacked) = {
            // Whoever pins it later does not find it any more. Renaming is fast: pins are taken on serving threads.
            let mut uses = cache.uses.lock();
            if uses.get(digest).is_some_and(|content| content.pins > 0) {
                return Ok(false);
            }
            uses.remove(digest);
            let content = match files::discard(&self.content(digest)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                discarded => discarded?,
            };
            (content, self.discard_unpacked(digest))
        };
        self.remove_derived(digest)?;
        files::remove(&content)?;
        if let Some(folder) = unpacked {
            fs::remove_dir_all(folder)?;
        }
        Ok(true)
    }
}

impl OriginCache {
    /// The uses of these contents; forgets those of others, unless they are pinned.
    fn uses_of(&self, contents: &[ArtifactInfo]) -> HashMap<Digest, ContentUse> {
        let is_present = |digest: &Digest| contents.binary_search_by_key(digest, |info| info.digest).is_ok();
        let mut uses = self.uses.lock();
        uses.retain(|digest, content| content.pins > 0 || is_present(digest));
        uses.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_leave_until_the_rest_fits() {
        let content = |name: &str, bytes, used| Evictable {
            digest: Digest::of(name.as_bytes()),
            bytes,
            used: Timestamp::from_second(used).unwrap(),
        };
        let all = vec![content("new", 10, 3), content("old", 10, 1), content("middle", 10, 2)];
        let names = |digests: &[Digest]| -> Vec<&str> {
            let name = |digest| {
                ["new", "old", "middle", "pinned"].into_iter().find(|n| Digest::of(n.as_bytes()) == digest)
            };
            digests.iter().map(|digest| name(*digest).unwrap()).collect()
        };
        // Beside them 20 bytes are pinned.
        for (target, expected) in [
            (50, &[][..]),
            (49, &["old"][..]),
            (40, &["old"]),
            (39, &["old", "middle"]),
            (25, &["old", "middle", "new"]),
            (0, &["old", "middle", "new"]),
        ] {
            assert_eq!(names(&plan(all.clone(), 50, target)), expected, "target {target}");
        }
    }
}
