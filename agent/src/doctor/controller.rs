//! Whether a controller answers, and how far its clock is from ours.

use super::{Check, Group};
use crate::controller::causes;
use std::time::{Duration, SystemTime};

/// A controller that takes longer is of no use.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Ages of measurements are compared across machines; seconds do not matter, minutes do.
const MOST_CLOCK_DIFFERENCE: Duration = Duration::from_secs(30);

/// What a controller answers to a request for a name that it does not know.
const MISDIRECTED: u16 = 421;

pub(super) fn check(url: &str) -> Check {
    const MEND: &str = "start it (`flexcomm controller`), open its port, or name the right URL";
    match ask(url) {
        Err(why) => Check::missing(Group::Agent, "controller", format!("{url}: {why}"), MEND),
        Ok(answer) if answer.status == MISDIRECTED => {
            let found = format!("{url} answers, but does not know itself by that name (421)");
            let mend = "name it by its IP address, or add the name to allowed_hosts in the controller's configuration";
            Check::missing(Group::Agent, "controller", found, mend)
        }
        Ok(answer) if answer.status != 200 => {
            let found = format!("{url}/healthz answers {}", answer.status);
            Check::missing(Group::Agent, "controller", found, MEND)
        }
        Ok(answer) => judge_clock(url, &answer),
    }
}

struct Answer {
    status: u16,
    took: Duration,
    /// The Date header, in seconds since 1970.
    date: Option<u64>,
    now: u64,
}

fn judge_clock(url: &str, answer: &Answer) -> Check {
    let found = format!("{url} answers in {:.1} ms", answer.took.as_secs_f64() * 1e3);
    match answer.date.map(|date| Duration::from_secs(date.abs_diff(answer.now))) {
        Some(apart) if apart > MOST_CLOCK_DIFFERENCE => {
            let found = format!("{found}, but its clock is {} s from ours", apart.as_secs());
            Check::warning(Group::Agent, "controller", found, "timedatectl set-ntp true, on both machines")
        }
        _ => Check::ok(Group::Agent, "controller", found),
    }
}

fn ask(url: &str) -> Result<Answer, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let client = reqwest::Client::builder().timeout(TIMEOUT).no_proxy().build().map_err(|e| causes(&e))?;
        let start = std::time::Instant::now();
        let url = format!("{}/healthz", url.trim_end_matches('/'));
        let response = client.get(url).send().await.map_err(|e| causes(&e))?;
        let date = response.headers().get("date").and_then(|value| http_date(value.to_str().ok()?));
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Ok(Answer { status: response.status().as_u16(), took: start.elapsed(), date, now })
    })
}

/// Seconds since 1970 of `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(text: &str) -> Option<u64> {
    Some(httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn dates_are_read() {
        assert_eq!(http_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(http_date("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        assert_eq!(http_date("Thu, 29 Feb 2024 12:00:00 GMT"), Some(1_709_208_000));
        assert_eq!(http_date("yesterday"), None);
    }

    #[test]
    fn a_clock_far_off_is_told() {
        let answer = |date| Answer { status: 200, took: Duration::from_millis(1), date, now: 1_000_000 };
        assert_eq!(judge_clock("u", &answer(None)).state, State::Ok);
        assert_eq!(judge_clock("u", &answer(Some(1_000_010))).state, State::Ok);
        assert_eq!(judge_clock("u", &answer(Some(999_000))).state, State::Warning);
    }

    #[test]
    fn nobody_listening_is_missing_with_the_cause() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let check = check(&format!("http://127.0.0.1:{port}"));
        assert_eq!(check.state, State::Missing);
        assert!(check.found.contains("refused"), "{}", check.found);
        assert_eq!(super::check("no url").state, State::Missing);
    }
}
