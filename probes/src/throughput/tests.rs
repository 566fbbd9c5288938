use super::*;
use crate::{Nanos, Token};
use proptest::prelude::*;

/// A bottleneck fed by TCP streams in slow start: every segment that leaves the bottleneck makes the sender's
/// window grow by one segment, up to the budget. `burst` bytes pass at once when the bucket is full.
struct Link {
    bps: f64,
    one_way_s: f64,
    burst: f64,
}

const MSS: f64 = 1448.0;

/// Arrival (seconds, bytes) of each segment.
fn slow_start(link: &Link, streams: usize, budget: f64) -> Vec<f64> {
    let rate = link.bps / 8.0;
    // Segments wait to be sent, in the order of time at which their ack allows them.
    let mut allowed: std::collections::BinaryHeap<std::cmp::Reverse<u64>> =
        (0..streams * 10).map(|_| std::cmp::Reverse(0)).collect();
    let (mut tokens, mut tokens_at, mut free_at, mut sent) = (link.burst, 0.0, 0.0f64, 0.0);
    let mut arrivals = Vec::new();
    while sent < budget {
        let Some(std::cmp::Reverse(ns)) = allowed.pop() else { break };
        let now = (ns as f64 * 1e-9).max(free_at);
        tokens = (tokens + (now - tokens_at) * rate).min(link.burst.max(MSS));
        let wait = ((MSS - tokens) / rate).max(0.0);
        let left = now + wait;
        tokens -= MSS - wait * rate;
        tokens_at = left;
        free_at = left;
        sent += MSS;
        arrivals.push(left + link.one_way_s);
        let ack = ((left + 2.0 * link.one_way_s) * 1e9) as u64;
        allowed.push(std::cmp::Reverse(ack));
        allowed.push(std::cmp::Reverse(ack));
    }
    arrivals
}

fn feed(arrivals: &[f64], rtt_s: f64) -> Receiving {
    let mut r = Receiving::new(Nanos(0), 10.0, rtt_s);
    for at in arrivals {
        r.data([(Nanos((at * 1e9) as u64), MSS as u64)]);
    }
    r
}

#[test]
fn the_rate_of_a_shaped_link_is_found_with_few_bytes() {
    for (bps, one_way_s, budget) in [
        (100e6, 0.00003, 2e6),
        (500e6, 0.00003, 8e6),
        (250e6, 0.001, 2e6),
        (10e6, 0.001, 125e3),
        (10e6, 0.05, 125e3),
        (250e6, 0.05, 1e6),
    ] {
        let link = Link { bps, one_way_s, burst: 4000.0 };
        let found = feed(&slow_start(&link, 4, budget), 2.0 * one_way_s).rate().unwrap();
        assert!((found.bps / bps - 1.0).abs() < 0.05, "{found:?} at {bps} bit/s, {one_way_s} s");
    }
}

#[test]
fn a_full_bucket_is_left_out() {
    let link = Link { bps: 100e6, one_way_s: 0.001, burst: 256e3 };
    let found = feed(&slow_start(&link, 4, 4e6), 0.002).rate().unwrap();
    assert!(found.steady && (found.bps / 100e6 - 1.0).abs() < 0.03, "{found:?}");
}

#[test]
fn a_steady_rate_ends_the_phase_early() {
    let link = Link { bps: 100e6, one_way_s: 0.0001, burst: 4000.0 };
    let mut r = Receiving::new(Nanos(0), 10.0, 0.0002);
    let mut stopped_after = None;
    for at in slow_start(&link, 4, 50e6) {
        let now = Nanos((at * 1e9) as u64);
        r.data([(now, MSS as u64)]);
        if r.wants_stop(now) {
            stopped_after = Some(r.received());
            break;
        }
    }
    let bytes = stopped_after.expect("never steady");
    assert!(bytes < 5_000_000, "{bytes}");
    assert!((r.rate().unwrap().bps / 100e6 - 1.0).abs() < 0.02);
}

#[test]
fn a_stall_of_the_reader_does_not_count() {
    let link = Link { bps: 100e6, one_way_s: 0.0001, burst: 4000.0 };
    let mut arrivals = slow_start(&link, 1, 4e6);
    // For 15 ms nobody reads; then everything comes at once.
    for at in &mut arrivals {
        if (0.15..0.165).contains(at) {
            *at = 0.165;
        }
    }
    let found = feed(&arrivals, 0.0002).rate().unwrap();
    assert!((found.bps / 100e6 - 1.0).abs() < 0.05, "{found:?}");
}

/// A job takes three quarters of the link, in the midst pauses for 0.3 s, and goes on.
#[test]
fn the_pause_of_a_job_shows_the_whole_link() {
    for (bps, rtt_s, steps) in [(100e6, 0.002, 3), (250e6, 0.1, 1)] {
        let mut r = Receiving::new(Nanos(0), 10.0, rtt_s);
        let mut at = 0.01;
        for _ in 0..steps {
            for (until, share) in [(0.9, 0.25), (1.2, 1.0), (1.6, 0.25)] {
                let end = at + until;
                while at < end {
                    at += MSS * 8.0 / (bps * share);
                    r.data([(Nanos((at * 1e9) as u64), MSS as u64)]);
                }
            }
        }
        let found = r.rate().unwrap();
        assert!((found.bps / bps - 1.0).abs() < 0.05 && !found.steady, "{found:?} at {bps} bit/s");
    }
}

/// 50 Mbit/s read by a process that got no processor for 20 ms: four streams have 16 kB each, stamped by their newest bytes.
#[test]
fn what_a_late_reader_finds_at_once_took_the_whole_time() {
    let late = [0u64, 1, 2, 3].map(|i| (Nanos(20_000_000 + i * 1_000), 16_384));
    let mut r = Receiving::new(Nanos(0), 10.0, 0.0001);
    r.data(late);
    let found = r.rate().unwrap();
    assert!(!found.steady && (found.bps / 26.2e6 - 1.0).abs() < 0.01, "{found:?}");
}

/// The last packets of a small test pass a token bucket together: they are too few to speak for the link.
#[test]
fn a_last_burst_is_not_taken_for_the_rate() {
    for (before, burst) in [(55_296, 10_240), (90_112, 40_960), (8_192, 10_000)] {
        let mut r = Receiving::new(Nanos(0), 10.0, 0.0001);
        r.data([(Nanos(20_000_000), before)]);
        r.data([(Nanos(20_002_000), burst)]);
        let found = r.rate().unwrap();
        assert!(!found.steady && found.bps <= (before + burst) as f64 * 8.0 / 0.0199, "{found:?} of {burst} bytes");
    }
}

/// Six points are early, and what follows is one look after a pause: between two points nothing is measured.
#[test]
fn interpolated_blocks_are_not_steady() {
    let mut r = Receiving::new(Nanos(0), 10.0, 0.0);
    let mut total = 0;
    for (ms, kb) in [(1u64, 10u64), (2, 50), (3, 55), (4, 60), (5, 65), (6, 70), (100, 200)] {
        r.data([(Nanos(ms * 1_000_000), (kb - total) * 1000)]);
        total = kb;
    }
    assert!(!r.rate().unwrap().steady, "{:?}", r.rate());
}

/// A round trip passes before the first byte can arrive: it is not the link's time for them.
#[test]
fn bytes_of_one_look_are_measured_from_when_they_could_arrive() {
    let mut r = Receiving::new(Nanos(0), 10.0, 0.1);
    r.data([(Nanos(110_000_000), 125_000)]);
    let found = r.rate().unwrap();
    assert!((found.bps / 100e6 - 1.0).abs() < 0.01, "{found:?}");
}

/// A slow link whose packets arrive in lumps of 64 kB, unevenly read: no lump is taken for the link's rate.
#[test]
fn lumps_on_a_slow_link_are_no_peak() {
    let mut r = Receiving::new(Nanos(0), 10.0, 0.001);
    for i in 0..16u32 {
        let late = if i % 3 == 1 { 0.02 } else { 0.0 };
        let at = f64::from(i) * 65_160.0 * 8.0 / 9.6e6 + late;
        r.data([(Nanos((at * 1e9) as u64), 65_160)]);
    }
    let found = r.rate().unwrap();
    assert!((found.bps / 9.6e6 - 1.0).abs() < 0.1, "{found:?}");
}

#[test]
fn a_phase_ends_by_budget_by_word_or_by_time() {
    let mut s = Sending::new(Nanos(0), 1000, 1.0);
    s.wrote(400);
    assert_eq!(s.allowance(Nanos(1)), 600);
    assert_eq!(s.allowance(Nanos(1_000_000_000)), 0);
    s.wrote(u64::MAX);
    assert_eq!((s.allowance(Nanos(1)), s.sent()), (0, 1000));
    let mut s = Sending::new(Nanos(0), 1000, 1.0);
    s.stop();
    assert_eq!(s.allowance(Nanos(1)), 0);
    let mut r = Receiving::new(Nanos(0), 1.0, 0.0);
    r.data([(Nanos(1), 10)]);
    assert!(!r.finished(Nanos(2)));
    r.done(10);
    assert!(r.finished(Nanos(2)));
    assert!(Receiving::new(Nanos(0), 1.0, 0.0).finished(Nanos(5_000_000_000)));
}

#[test]
fn plans_are_checked() {
    assert!(Plan::new(0, 1 << 20, 1.0, Direction::Out).is_err());
    assert!(Plan::new(17, 1 << 20, 1.0, Direction::Out).is_err());
    assert!(Plan::new(1, 100_000, 1.0, Direction::Both).is_err());
    assert!(Plan::new(1, 100_000, 1.0, Direction::Out).is_ok());
    assert!(Plan::new(1, u64::MAX, 1.0, Direction::Out).is_err());
    let text = Plan::new(1, 1 << 20, f64::NAN, Direction::Out).unwrap_err().to_string();
    assert_eq!(text, "time limit in seconds is NaN, allowed is 0.1 to 30");
}

#[test]
fn what_windows_bound_or_was_over_too_soon_is_a_lower_bound() {
    // 100 Mbit/s for 0.2 s over round trips of 20 ms, by windows of 250 kB together.
    let rate = Rate { bps: 1e8, steady: true, used_bytes: 2.5e6, used_s: 0.2 };
    let tcp = |cwnd, retransmits| TcpSummary {
        rtt_us: 20_000,
        min_rtt_us: 20_000,
        retransmits,
        cwnd,
        mss: 1000,
        delivery_bps: 1e8,
    };
    let result = |rate: Rate, tcp: TcpSummary| DirectionResult { rate, sent_bytes: 3_000_000, tcp };
    assert!(result(rate, tcp(250, 0)).is_lower_bound(), "windows are all that is under way");
    assert!(!result(rate, tcp(250, 3)).is_lower_bound(), "the link dropped what was more");
    assert!(!result(rate, tcp(400, 0)).is_lower_bound(), "the rest waits in a queue, or is paced");
    assert!(result(Rate { used_s: 0.05, ..rate }, tcp(400, 0)).is_lower_bound(), "fewer than four round trips");
    assert!(!result(Rate { steady: false, ..rate }, tcp(400, 0)).is_lower_bound(), "a job used the link, too");
    let plenty = Rate { used_s: 0.05, used_bytes: 4e7, ..rate };
    assert!(!result(plenty, tcp(400, 0)).is_lower_bound(), "the receiver had enough");
    assert!(!result(rate, TcpSummary::default()).is_lower_bound(), "a kernel that says nothing");
}

fn frames() -> Vec<Frame> {
    let tcp = TcpSummary { rtt_us: 1, min_rtt_us: 2, retransmits: 3, cwnd: 4, mss: 5, delivery_bps: 6.0 };
    let rate = Rate { bps: 1e8, steady: true, used_bytes: 1e6, used_s: 0.08 };
    let plan = Plan::new(3, 1 << 20, 2.5, Direction::Back).unwrap().paced(1000);
    vec![
        Frame::Challenge([7; 32]),
        Frame::Hello { nonce: [1; 32], purpose: Purpose::Control { plan, rtt_us: 9 }, proof: [2; 32] },
        Frame::Hello { nonce: [1; 32], purpose: Purpose::Stream { session: 5 }, proof: [2; 32] },
        Frame::Accept { session: 3, proof: [4; 32] },
        Frame::Refuse(Refusal::Busy(77)),
        Frame::Refuse(Refusal::Token),
        Frame::Refuse(Refusal::Request),
        Frame::Ready,
        Frame::Stop,
        Frame::Done { bytes: 12, tcp },
        Frame::Report(None),
        Frame::Report(Some(rate)),
        Frame::Go,
    ]
}

#[test]
fn frames_survive_the_wire_in_any_pieces() {
    let bytes: Vec<u8> = frames().iter().flat_map(Frame::encode).collect();
    for piece in [1, 2, 7, 100] {
        let (mut reader, mut got) = (FrameReader::default(), Vec::new());
        for chunk in bytes.chunks(piece) {
            reader.push(chunk);
            while let Some(frame) = reader.next_frame().unwrap() {
                got.push(frame);
            }
        }
        assert_eq!(got, frames());
    }
}

#[test]
fn proofs_depend_on_everything() {
    let key = Token::new("a cluster's token").unwrap().throughput_key();
    let stream = |session| Purpose::Stream { session };
    let base = client_proof(&key, &[1; 32], &[2; 32], &stream(3));
    assert_ne!(base, client_proof(&key, &[9; 32], &[2; 32], &stream(3)));
    assert_ne!(base, client_proof(&key, &[1; 32], &[9; 32], &stream(3)));
    assert_ne!(base, client_proof(&key, &[1; 32], &[2; 32], &stream(4)));
    assert_ne!(server_proof(&key, &[1; 32], &[2; 32], 3), server_proof(&key, &[2; 32], &[1; 32], 3));
    let other = Token::new("another token").unwrap().throughput_key();
    assert_ne!(base, client_proof(&other, &[1; 32], &[2; 32], &stream(3)));
}

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut reader = FrameReader::default();
        reader.push(&bytes);
        for _ in 0..600 {
            match reader.next_frame() {
                Ok(Some(_)) => {}
                _ => break,
            }
        }
        prop_assert!(reader.room() <= 4 * 195);
    }

    #[test]
    fn broken_frames_are_survived(which in 0usize..13, bit in any::<usize>(), cut in any::<usize>()) {
        let mut bytes = frames()[which].encode();
        let bit = bit % (bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes.truncate(1 + cut % bytes.len());
        let mut reader = FrameReader::default();
        reader.push(&bytes);
        let _ = reader.next_frame();
    }

    #[test]
    fn any_arrivals_give_a_finite_rate(points in prop::collection::vec((any::<u64>(), any::<u32>()), 0..300), rtt in 0.0..1.0f64) {
        let mut curve = Curve::new(Nanos(0));
        for (at, bytes) in points {
            curve.add(Nanos(at), u64::from(bytes));
        }
        if let Some(rate) = curve.rate(rtt) {
            prop_assert!(rate.bps.is_finite() && rate.bps >= 0.0);
        }
    }
}
