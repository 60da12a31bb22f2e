//! Counts tests from the output of their runners.

use anyhow::{Context, Result};

/// The prefix of the line with which a test reports that it was skipped, with or without its name.
const SKIPPED: &str = "SKIPPED ";
const SKIPPED_NAMELESS: &str = "skipped: ";

/// The results of tests.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct TestCount {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    /// `<name>: <reason>` of skipped tests.
    pub(crate) skips: Vec<String>,
    /// The names of failed tests.
    pub(crate) failures: Vec<String>,
}

impl TestCount {
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skips.extend(other.skips);
        self.failures.extend(other.failures);
    }

    /// Adds a JUnit report of cargo-nextest. A test case is an element; a failed one contains a `failure` or `error`,
    /// and the output of a passing one is in its `system-out`.
    pub(crate) fn add_junit(&mut self, xml: &str) -> Result<()> {
        let mut cases = xml.split("<testcase ");
        cases.next().context("the test report is empty")?;
        for case in cases {
            let end = case.find("</testcase>").or_else(|| case.find("/>")).unwrap_or(case.len());
            let case = &case[..end];
            let name = attribute(case, "name").unwrap_or_default();
            // `failure` means that all retries failed; attempts before a pass are `flakyFailure`.
            if case.contains("<failure") || case.contains("<error") {
                self.failed += 1;
                let suite = attribute(case, "classname").unwrap_or_default();
                self.failures.push(format!("{suite} {name}"));
                continue;
            }
            let skips: Vec<String> = printed(case).lines().filter_map(|line| skip(line, &name)).collect();
            if skips.is_empty() {
                self.passed += 1;
            }
            self.skips.extend(skips);
        }
        Ok(())
    }
}

fn skip(line: &str, test: &str) -> Option<String> {
    let line = line.trim();
    let nameless = || line.strip_prefix(SKIPPED_NAMELESS).map(|reason| format!("{test}: {reason}"));
    line.strip_prefix(SKIPPED).map(str::to_owned).or_else(nameless)
}

fn attribute(element: &str, name: &str) -> Option<String> {
    let (_, rest) = element.split_once(&format!("{name}=\""))?;
    rest.split_once('"').map(|(value, _)| unescape(value))
}

fn printed(case: &str) -> String {
    let mut text = String::new();
    for (open, close) in [("<system-out>", "</system-out>"), ("<system-err>", "</system-err>")] {
        if let Some((_, rest)) = case.split_once(open) {
            text.push_str(&unescape(rest.split_once(close).map_or(rest, |(inside, _)| inside)));
            text.push('\n');
        }
    }
    text
}

fn unescape(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
    text.replace("&apos;", "'").replace("&#39;", "'").replace("&amp;", "&")
}

/// Reads the output of `cargo test -- --show-output` line by line.
#[derive(Default)]
pub(crate) struct CargoTestOutput {
    pub(crate) count: TestCount,
    /// Whether the line is between `successes:` and the next heading, in the output of passing tests.
    in_successes: bool,
    skips_of_this_binary: usize,
    /// The test whose output follows.
    test: String,
}

impl CargoTestOutput {
    /// Parses a line; returns it if it should be printed.
    pub(crate) fn take<'l>(&mut self, line: &'l str) -> Option<&'l str> {
        if line == "successes:" {
            self.in_successes = true;
            return None;
        }
        if line == "failures:" || line.starts_with("test result:") {
            self.in_successes = false;
        }
        if self.in_successes {
            if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"))
            {
                self.test = test.to_owned();
            }
            if let Some(skip) = skip(line, &self.test) {
                self.skips_of_this_binary += 1;
                self.count.skips.push(skip);
            }
            return None;
        }
        if let Some(rest) = line.strip_prefix("test result:") {
            let passed = number_before(rest, " passed");
            self.count.passed += passed.saturating_sub(std::mem::take(&mut self.skips_of_this_binary));
            self.count.failed += number_before(rest, " failed");
            // Hides the many binaries without tests.
            return (passed > 0 || !rest.contains(" 0 failed")).then_some(line);
        }
        if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.count.failures.push(name.to_owned());
        }
        let noise = line.is_empty() || line.ends_with(" ... ok") || line.starts_with("running ");
        (!noise).then_some(line)
    }
}

fn number_before(text: &str, word: &str) -> usize {
    let Some((before, _)) = text.split_once(word) else { return 0 };
    before.rsplit([' ', ';']).next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_junit_report_is_counted_by_test_case() {
        let xml = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="xtask" tests="4" failures="1" errors="0" uuid="x" timestamp="y" time="0.1">
    <testsuite name="mayfly-store" tests="4" disabled="0" errors="0" failures="1">
        <testcase name="quick" classname="mayfly-store" timestamp="y" time="0.008">
            <system-out>
running 1 test
test quick ... ok
</system-out>
            <system-err></system-err>
        </testcase>
        <testcase name="bare" classname="mayfly-store" timestamp="y" time="0.008"/>
        <testcase name="kubectl::gets" classname="mayfly-e2e" timestamp="y" time="0.008">
            <system-out>running 1 test
SKIPPED kubectl::gets: no &lt;kubectl&gt; on the PATH
test kubectl::gets ... ok
</system-out>
        </testcase>
        <testcase name="broken" classname="mayfly-store" timestamp="y" time="0.015">
            <failure message="assertion failed &quot;left&quot;" type="test failure">said SKIPPED nothing</failure>
        </testcase>
    </testsuite>
</testsuites>"#;
        let mut count = TestCount::default();
        count.add_junit(xml).unwrap();
        let expect = TestCount {
            passed: 2,
            failed: 1,
            skips: vec!["kubectl::gets: no <kubectl> on the PATH".into()],
            failures: vec!["mayfly-store broken".into()],
        };
        assert_eq!(count, expect);
    }

    #[test]
    fn the_output_of_cargo_test_is_counted_and_thinned() {
        let output = "
running 4 tests
test quick ... ok
test mount ... ok
test kubectl_gets ... ok
test broken ... FAILED

successes:

---- kubectl_gets stdout ----
SKIPPED kubectl_gets: no kubectl on the PATH
noise

---- mount stdout ----
skipped: not root

successes:
    quick
    kubectl_gets
    mount

failures:

---- broken stdout ----
it broke

failures:
    broken

test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

running 0 tests

test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let mut reader = CargoTestOutput::default();
        let shown: Vec<&str> = output.lines().filter_map(|line| reader.take(line)).collect();
        let expect = TestCount {
            passed: 1,
            failed: 1,
            skips: vec!["kubectl_gets: no kubectl on the PATH".into(), "mount: not root".into()],
            failures: vec!["broken".into()],
        };
        assert_eq!(reader.count, expect);
        assert!(shown.contains(&"it broke") && !shown.contains(&"noise"), "{shown:?}");
        assert_eq!(shown.iter().filter(|line| line.starts_with("test result")).count(), 1);
    }
}
