use super::*;
use crate::{Nanos, Token};
use proptest::prelude::*;
use std::net::IpAddr;
use std::net::Ipv4Addr;

const PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const MS: u64 = 1_000_000;
const S: u64 = 1_000_000_000;

fn token() -> Token {
    Token::new("a token of the cluster").unwrap()
}

fn pair() -> (Prober, Responder) {
    let limits = ProberLimits::default();
    (Prober::new(token().echo_key(), 42, limits), Responder::new(token().echo_key(), [7; 32]))
}

/// One exchange: 1 ms out, 0.5 ms held, 2 ms back.
fn exchange(p: &mut Prober, r: &mut Responder, now: u64) -> Received {
    let request = p.send(Nanos(now));
    let answer = r.handle(Nanos(now + MS), PEER, &request).unwrap();
    let bytes = answer.seal(Nanos(now + MS + MS / 2), r.key());
    assert!(bytes.len() <= request.len());
    p.receive(Nanos(now + 3 * MS + MS / 2), &bytes).unwrap()
}

#[test]
fn the_first_request_fetches_a_cookie_and_the_next_is_measured() {
    let (mut p, mut r) = pair();
    assert_eq!(exchange(&mut p, &mut r, 0), Received::Hello);
    let Received::Reply(sample) = exchange(&mut p, &mut r, S) else { panic!("no reply") };
    assert!((sample.rtt_s - 0.003).abs() < 1e-12);
    let summary = p.summary(Nanos(2 * S));
    assert_eq!((summary.sent, summary.answered, summary.loss), (1, 1, 0.0));
    assert_eq!(r.stats(), ResponderStats { replies: 1, hellos: 1, ..Default::default() });
}

proptest! {
    /// Against a list of requests that are neither answered, given up nor taken back.
    #[test]
    fn pending_requests_are_counted(steps in prop::collection::vec((0..4u8, 1..3000u64), 1..80)) {
        let ((mut p, mut r), mut now) = (pair(), 0);
        let mut open: Vec<(u64, [u8; LEN])> = Vec::new();
        for (step, wait_ms) in steps {
            now += wait_ms * MS / 4;
            let old = |sent: u64| Nanos(now).since(Nanos(sent)) > ProberLimits::default().timeout_s;
            let given_up = open.iter().filter(|(sent, _)| old(*sent)).count();
            prop_assert_eq!(p.expire(Nanos(now)), given_up as u64);
            open.retain(|(sent, _)| !old(*sent));
            match step {
                0 | 1 => open.push((now, p.send(Nanos(now)))),
                2 => {
                    p.send(Nanos(now));
                    p.unsend();
                }
                _ if !open.is_empty() => {
                    let at = wait_ms as usize % open.len();
                    let answer = r.handle(Nanos(now), PEER, &open[at].1).unwrap().seal(Nanos(now), r.key());
                    // One that is too late now stays open until it is given up.
                    if p.receive(Nanos(now + MS / 8), &answer).is_ok() {
                        open.remove(at);
                    }
                }
                _ => {}
            }
            prop_assert_eq!(p.pending(), open.len());
        }
    }
}

#[test]
fn replays_and_forgeries_get_no_answer() {
    let (mut p, mut r) = pair();
    exchange(&mut p, &mut r, 0);
    let request = p.send(Nanos(S));
    assert!(r.handle(Nanos(S), PEER, &request).unwrap().is_reply());
    assert_eq!(r.handle(Nanos(S), PEER, &request).unwrap_err(), Refused::Replayed(2));
    // From another address the cookie is not valid: a hello, no reply.
    let other = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    assert!(!r.handle(Nanos(S), other, &request).unwrap().is_reply());
    // Two periods later the cookie is stale.
    assert!(!r.handle(Nanos(130 * S), PEER, &request).unwrap().is_reply());
    let foreign =
        Prober::new(Token::new("another token").unwrap().echo_key(), 1, ProberLimits::default()).send(Nanos(0));
    assert_eq!(r.handle(Nanos(S), PEER, &foreign).unwrap_err(), Refused::Malformed(Malformed::Forged));
    assert_eq!(r.stats().replayed, 1);
    assert_eq!(r.stats().malformed, 1);
}

#[test]
fn a_restarted_responder_is_found_again() {
    let (mut p, mut r) = pair();
    exchange(&mut p, &mut r, 0);
    exchange(&mut p, &mut r, S);
    let mut r = Responder::new(token().echo_key(), [8; 32]);
    assert_eq!(exchange(&mut p, &mut r, 2 * S), Received::Hello);
    assert!(matches!(exchange(&mut p, &mut r, 3 * S), Received::Reply(_)));
    assert_eq!(p.summary(Nanos(4 * S)).loss, 0.0);
}

#[test]
fn hellos_and_sessions_are_limited() {
    let mut r = Responder::new(token().echo_key(), [7; 32]);
    let mut limited = 0;
    for session in 0..3000 {
        let request = Prober::new(token().echo_key(), session, ProberLimits::default()).send(Nanos(0));
        limited += u32::from(r.handle(Nanos(0), PEER, &request).is_err());
    }
    assert_eq!(limited, 2000);
    let mut r = Responder::new(token().echo_key(), [7; 32]);
    let mut full = 0;
    for session in 0..MAX_SESSIONS as u64 + 10 {
        let mut p = Prober::new(token().echo_key(), session, ProberLimits::default());
        let now = session * 2 * MS;
        exchange(&mut p, &mut r, now);
        let request = p.send(Nanos(now));
        full += u64::from(matches!(r.handle(Nanos(now), PEER, &request), Err(Refused::Full)));
    }
    assert_eq!(full, 10);
    // Idle for two periods, they make room.
    let mut p = Prober::new(token().echo_key(), u64::MAX, ProberLimits::default());
    exchange(&mut p, &mut r, 200 * S);
    assert!(matches!(exchange(&mut p, &mut r, 201 * S), Received::Reply(_)));
}

#[test]
fn loss_is_told_apart_by_direction() {
    let (mut p, mut r) = pair();
    exchange(&mut p, &mut r, 0);
    for i in 1..=1000u64 {
        let now = i * 10 * MS;
        let request = p.send(Nanos(now));
        // One in ten is lost on the way out, one in five of the answers on the way back.
        if i % 10 == 3 {
            continue;
        }
        let answer = r.handle(Nanos(now + MS), PEER, &request).unwrap().seal(Nanos(now + MS), r.key());
        if i % 5 != 1 {
            p.receive(Nanos(now + 2 * MS), &answer).unwrap();
        }
    }
    let s = p.summary(Nanos(20 * S));
    assert_eq!((s.sent, s.answered), (1000, 700));
    assert!((s.loss - 0.3).abs() < 1e-9);
    assert!((s.loss_out.unwrap() - 0.1).abs() < 0.01, "{s:?}");
    assert!((s.loss_back.unwrap() - 2.0 / 9.0).abs() < 0.01, "{s:?}");
}

#[test]
fn late_repeated_and_foreign_answers_do_not_count() {
    let (mut p, mut r) = pair();
    exchange(&mut p, &mut r, 0);
    let request = p.send(Nanos(S));
    let answer = r.handle(Nanos(S), PEER, &request).unwrap().seal(Nanos(S), r.key());
    assert!(p.receive(Nanos(S + MS), &answer).is_ok());
    assert_eq!(p.receive(Nanos(S + MS), &answer).unwrap_err(), ReceiveError::Unexpected(2));
    let request = p.send(Nanos(2 * S));
    let answer = r.handle(Nanos(2 * S), PEER, &request).unwrap().seal(Nanos(2 * S), r.key());
    assert_eq!(p.receive(Nanos(5 * S), &answer).unwrap_err(), ReceiveError::Unexpected(3));
    assert_eq!(p.summary(Nanos(6 * S)).loss, 0.5);
    let mut other = Prober::new(token().echo_key(), 43, ProberLimits::default());
    assert!(other.receive(Nanos(S), &answer).is_err());
}

#[test]
fn queueing_shows_in_its_own_direction() {
    let (mut p, mut r) = pair();
    exchange(&mut p, &mut r, 0);
    for i in 1..=100u64 {
        let now = i * 100 * MS;
        let request = p.send(Nanos(now));
        let arrived = now + MS + (i % 2) * 10 * MS;
        let answer = r.handle(Nanos(arrived), PEER, &request).unwrap().seal(Nanos(arrived), r.key());
        p.receive(Nanos(arrived + MS), &answer).unwrap();
    }
    let s = p.summary(Nanos(11 * S));
    assert!((s.jitter_out_s.unwrap() - 0.01).abs() < 1e-9 && s.jitter_back_s.unwrap() < 1e-9, "{s:?}");
    assert!(s.excess_out_s.unwrap() > 0.004 && s.excess_back_s.unwrap() < 1e-9, "{s:?}");
}

#[test]
fn what_is_not_known_is_null_and_not_zero() {
    let (mut p, _) = pair();
    p.send(Nanos(0));
    let summary = serde_json::to_value(p.summary(Nanos(9 * S))).unwrap();
    assert_eq!((&summary["sent"], &summary["answered"]), (&1.into(), &0.into()));
    for key in ["min_s", "median_s", "p95_s", "p99_s", "max_s", "jitter_s", "jitter_out_s", "excess_back_s"] {
        assert!(summary.get(key).is_some_and(serde_json::Value::is_null), "{key} in {summary}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200), now in any::<u64>()) {
        let (mut p, mut r) = pair();
        prop_assert!(r.handle(Nanos(now), PEER, &bytes).is_err());
        prop_assert!(p.receive(Nanos(now), &bytes).is_err());
    }

    #[test]
    fn one_changed_bit_is_noticed(bit in 0usize..LEN * 8) {
        let (mut p, mut r) = pair();
        let mut request = p.send(Nanos(0));
        request[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(r.handle(Nanos(0), PEER, &request).is_err());
    }

    #[test]
    fn packets_survive_the_wire(session in any::<u64>(), seq in any::<u64>(), cookie in any::<u64>(), n in any::<[u64; 3]>()) {
        let key = token().echo_key();
        for body in [Body::Request, Body::Hello, Body::Reply { received: n[0], arrived_ns: n[1], hold_ns: n[2] }] {
            let packet = Packet { session, seq, cookie, body };
            prop_assert_eq!(Packet::decode(&packet.encode(&key), &key), Ok(packet));
        }
    }

    /// Whatever order requests come in, each number is answered at most once, and at least once when in the window.
    #[test]
    fn each_number_is_answered_once(order in prop::collection::vec(1u64..600, 1..400)) {
        let (mut p, mut r) = pair();
        exchange(&mut p, &mut r, 0);
        let requests: Vec<_> = (0..600).map(|_| p.send(Nanos(S))).collect();
        let (mut seen, mut highest) = (std::collections::HashSet::new(), 0);
        for i in order {
            let fresh = seen.insert(i);
            let expected = fresh && i + 256 > highest;
            prop_assert_eq!(r.handle(Nanos(S), PEER, &requests[i as usize]).is_ok(), expected);
            highest = highest.max(i);
        }
    }
}
