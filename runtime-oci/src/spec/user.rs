//! Resolves the user of a process from the pod and the image; pure functions.

use mayfly_runtime::{ContainerSpec, SecurityOptions};

/// The user of a process, with names resolved in the image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessUser {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
}

/// The user of the container or else of its image; `passwd` and `group` are the contents of the image's files.
///
/// # Errors
/// A name is not in the files, or an id is invalid.
pub(crate) fn user(
    security: &SecurityOptions,
    image_user: &str,
    passwd: &str,
    group: &str,
) -> Result<ProcessUser, String> {
    let number =
        |value: i64| u32::try_from(value).map_err(|_| format!("{value} is not a valid user or group id"));
    let (name, group_name) = match image_user.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (image_user, None),
    };
    let entry = |text: &str, at: usize, key: &str| {
        let rows = text.lines().map(|line| line.split(':').collect::<Vec<_>>());
        rows.into_iter()
            .find(|row| row.get(at) == Some(&key))
            .map(|row| row.iter().map(|field| (*field).to_owned()).collect::<Vec<_>>())
    };
    let wanted = match security.user {
        Some(id) => number(id)?.to_string(),
        None => name.to_owned(),
    };
    let row = entry(passwd, 0, &wanted).or_else(|| entry(passwd, 2, &wanted));
    let field = |row: &Option<Vec<String>>, at: usize| row.as_ref()?.get(at)?.parse::<u32>().ok();
    let uid = match (wanted.as_str(), wanted.parse(), field(&row, 2)) {
        ("", _, _) => 0,
        (_, Ok(uid), _) => uid,
        (_, Err(_), Some(uid)) => uid,
        (name, Err(_), None) => return Err(format!("the image has no user {name:?}")),
    };
    let gid = match (security.group, group_name.filter(|_| security.user.is_none())) {
        (Some(id), _) => number(id)?,
        (None, Some(name)) => match (name.parse(), field(&entry(group, 0, name), 2)) {
            (Ok(gid), _) | (Err(_), Some(gid)) => gid,
            (Err(_), None) => return Err(format!("the image has no group {name:?}")),
        },
        (None, None) => field(&row, 3).unwrap_or(0),
    };
    let user_name = row.as_ref().and_then(|row| row.first()).cloned().unwrap_or_default();
    let in_image = group.lines().filter_map(|line| {
        let row: Vec<_> = line.split(':').collect();
        let is_member = row.get(3)?.split(',').any(|member| !user_name.is_empty() && member == user_name);
        row.get(2)?.parse::<u32>().ok().filter(|_| is_member)
    });
    let mut groups: Vec<u32> = in_image.filter(|_| !security.ignores_image_groups).collect();
    for id in &security.supplemental_groups {
        groups.push(number(*id)?);
    }
    groups.sort_unstable();
    groups.dedup();
    Ok(ProcessUser { uid, gid, groups })
}

/// Upstream's message for a container with `runAsNonRoot` that would run as root. `pod`: its title in messages.
pub(crate) fn non_root_refusal(container: &ContainerSpec, user: &ProcessUser, pod: &str) -> Option<String> {
    let security = &container.process.security;
    if !security.run_as_non_root || user.uid != 0 {
        return None;
    }
    let why = match security.user {
        Some(_) => "container's runAsUser breaks non-root policy",
        None => "container has runAsNonRoot and image will run as root",
    };
    Some(format!("{why} (pod: {pod:?}, container: {})", container.id.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_number() {
        let passwd = "root:x:0:0::/:/bin/sh\napp:x:100:101::/:/bin/sh\n";
        let group = "app:x:101:\nextra:x:7:app,other\n";
        let plain = SecurityOptions::default();
        let expected = |uid, gid, groups: &[u32]| Ok(ProcessUser { uid, gid, groups: groups.to_vec() });
        assert_eq!(user(&plain, "", passwd, group), expected(0, 0, &[]));
        assert_eq!(user(&plain, "app", passwd, group), expected(100, 101, &[7]));
        assert_eq!(user(&plain, "100", passwd, group), expected(100, 101, &[7]));
        assert_eq!(user(&plain, "app:extra", passwd, group), expected(100, 7, &[7]));
        assert_eq!(user(&plain, "4000:5", passwd, group), expected(4000, 5, &[]));
        let own = SecurityOptions {
            user: Some(1000),
            group: Some(2000),
            supplemental_groups: vec![3000],
            ..SecurityOptions::default()
        };
        assert_eq!(user(&own, "app", passwd, group), expected(1000, 2000, &[3000]));
        let strict = SecurityOptions { ignores_image_groups: true, ..SecurityOptions::default() };
        assert_eq!(user(&strict, "app", passwd, group), expected(100, 101, &[]));
        let strict = SecurityOptions { supplemental_groups: vec![7], ..strict };
        assert_eq!(user(&strict, "app", passwd, group), expected(100, 101, &[7]));
        assert!(user(&plain, "nobody", passwd, group).is_err());
    }
}
