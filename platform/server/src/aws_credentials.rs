//! Credentials for requests to AWS services at endpoints, from the places of AWS's own tools: `AWS_*` in the
//! environment, otherwise the profile's section in `~/.aws/credentials` and `~/.aws/config`.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use mayfly_workflows_engine::engine::Credentials;

/// The settings found in these places.
#[derive(Debug, Default)]
pub(crate) struct FoundCredentials {
    pub(crate) credentials: Option<Credentials>,
    pub(crate) region: Option<String>,
}

/// The section used without a profile.
const DEFAULT_PROFILE: &str = "default";

/// Searches these places. `variable` reads the environment.
pub(crate) fn find(variable: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<FoundCredentials> {
    let named = variable("AWS_PROFILE");
    let profile = named.as_deref().unwrap_or(DEFAULT_PROFILE);
    let file = |name: &str, usual: &str| {
        let home = || Some(PathBuf::from(variable("HOME")?).join(".aws").join(usual));
        variable(name).map(PathBuf::from).or_else(home)
    };
    let region = match variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION")) {
        Some(region) => Some(region),
        None => {
            let section = match profile {
                DEFAULT_PROFILE => DEFAULT_PROFILE.to_owned(),
                profile => format!("profile {profile}"),
            };
            read(file("AWS_CONFIG_FILE", "config"))?.and_then(|text| value(&text, &section, "region"))
        }
    };
    let credentials = match (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")) {
        (Some(access_key_id), Some(secret_access_key)) => {
            let session_token = variable("AWS_SESSION_TOKEN");
            Some(Credentials { access_key_id, secret_access_key, session_token })
        }
        (None, None) => {
            let path = file("AWS_SHARED_CREDENTIALS_FILE", "credentials");
            let shown = path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
            let text = read(path)?.unwrap_or_default();
            let of = |name: &str| value(&text, profile, name);
            match (of("aws_access_key_id"), of("aws_secret_access_key")) {
                (Some(access_key_id), Some(secret_access_key)) => {
                    let session_token = of("aws_session_token");
                    Some(Credentials { access_key_id, secret_access_key, session_token })
                }
                _ if named.is_some() => bail!("AWS_PROFILE is {profile}, and {shown} has no key for it"),
                _ => None,
            }
        }
        _ => bail!("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY belong together: set both or neither"),
    };
    Ok(FoundCredentials { credentials, region })
}

/// Reads a file; `None` if it does not exist.
fn read(path: Option<PathBuf>) -> anyhow::Result<Option<String>> {
    let Some(path) = path else { return Ok(None) };
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// The value of `name = value` in `[section]`.
fn value(text: &str, section: &str, name: &str) -> Option<String> {
    let mut inside = false;
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(heading) = line.strip_prefix('[') {
            let heading = heading.split(']').next().unwrap_or_default();
            inside = heading.split_whitespace().eq(section.split_whitespace());
        } else if let Some((found, value)) = line.split_once('=')
            && inside
            && found.trim() == name
        {
            return Some(value.trim().to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(home: &std::path::Path, set: &[(&str, &str)]) -> Result<String, String> {
        let variable = |name: &str| match name {
            "HOME" => Some(home.display().to_string()),
            name => set.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned()),
        };
        let found = find(&variable).map_err(|error| error.to_string())?;
        let told = found.credentials.map_or("nobody".to_owned(), |who| {
            format!(
                "{}:{}:{}",
                who.access_key_id,
                who.secret_access_key,
                who.session_token.unwrap_or_default()
            )
        });
        Ok(format!("{told} {}", found.region.unwrap_or_default()))
    }

    #[test]
    fn keys_are_found_where_awss_tools_find_them() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(found(home.path(), &[]).unwrap(), "nobody ");
        let (id, key) = (("AWS_ACCESS_KEY_ID", "A"), ("AWS_SECRET_ACCESS_KEY", "s"));
        let all = [id, key, ("AWS_SESSION_TOKEN", "t"), ("AWS_REGION", "eu-west-1")];
        assert_eq!(found(home.path(), &all).unwrap(), "A:s:t eu-west-1");
        assert!(found(home.path(), &[id]).unwrap_err().contains("belong together"));
        let folder = home.path().join(".aws");
        std::fs::create_dir(&folder).unwrap();
        let text = "# mine\n[default]\naws_access_key_id = D\naws_secret_access_key=d=\n\n[work]\n\
                    aws_access_key_id = W\naws_secret_access_key = w\naws_session_token = k\n[half]\n\
                    aws_access_key_id = H\n";
        std::fs::write(folder.join("credentials"), text).unwrap();
        std::fs::write(folder.join("config"), "[default]\nregion = r-1\n[profile work]\nregion = r-2\n")
            .unwrap();
        assert_eq!(found(home.path(), &[]).unwrap(), "D:d=: r-1");
        assert_eq!(found(home.path(), &[("AWS_PROFILE", "work")]).unwrap(), "W:w:k r-2");
        assert_eq!(found(home.path(), &all).unwrap(), "A:s:t eu-west-1");
        for profile in ["half", "none"] {
            assert!(found(home.path(), &[("AWS_PROFILE", profile)]).unwrap_err().contains("has no key"));
        }
    }
}
