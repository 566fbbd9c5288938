//! What transfers take, against what can be worked out by hand.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_truth::coefficients::{Coefficients, Tcp};
use flexcomm_truth::network::{Burst, Network, NetworkEvent, Port};
use flexcomm_truth::trace::{Step, Trace};
use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn tcp() -> Tcp {
    Tcp { stack_s: 0.0, overhead_bytes: 0.0, ..Coefficients::frozen().tcp }
}

/// A window that nothing here uses up.
fn wide() -> Tcp {
    Tcp { initial_segments: 1e9, window_bytes: 1e15, ..tcp() }
}

fn port(rate: f64) -> Port {
    Port { rate: Trace::constant(rate), competitors: Trace::constant(0.0), buffer: 1e12, burst: None }
}

fn network(tcp: Tcp, ports: Vec<Port>) -> Network<u32> {
    Network::new(tcp, ports, ChaCha8Rng::seed_from_u64(1))
}

/// When each message arrives, in the order of arrival.
fn arrivals(network: &mut Network<u32>) -> Vec<(u32, f64)> {
    let mut all = Vec::new();
    while let Some(NetworkEvent::Delivered(token)) = network.advance() {
        all.push((token, network.now()));
    }
    all
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * (1.0 + b.abs())
}

#[test]
fn a_message_takes_its_latency_and_its_bytes() {
    let mut network = network(wide(), vec![port(1e6), port(1e9)]);
    let connection = network.connect(vec![0, 1], Trace::constant(0.05), Trace::constant(0.05));
    network.send(connection, 1e6, 1);
    network.send(connection, 5e5, 2);
    let times = arrivals(&mut network);
    assert!(near(times[0].1, 1.05) && near(times[1].1, 1.55), "{times:?}");
}

#[test]
fn connections_share_a_port_and_take_over_what_others_leave() {
    let mut network = network(wide(), vec![port(1e6), port(1e6), port(1e6)]);
    let none = || Trace::constant(0.0);
    let (a, b) = (network.connect(vec![0, 1], none(), none()), network.connect(vec![0, 2], none(), none()));
    network.send(a, 1e6, 1);
    network.send(b, 5e5, 2);
    // Half each until b has its half a megabyte, then a alone.
    let times = arrivals(&mut network);
    assert!(near(times[0].1, 1.0) && near(times[1].1, 1.5), "{times:?}");
}

#[test]
fn what_another_port_holds_back_is_the_others() {
    let mut network = network(wide(), vec![port(1e6), port(2e5), port(1e9)]);
    let none = || Trace::constant(0.0);
    let (slow, fast) = (network.connect(vec![0, 1], none(), none()), network.connect(vec![0, 2], none(), none()));
    network.send(slow, 2e5, 1);
    network.send(fast, 8e5, 2);
    let times = arrivals(&mut network);
    assert!(times.iter().all(|(_, at)| near(*at, 1.0)), "{times:?}");
}

#[test]
fn a_rate_that_changes_and_competitors_count_from_their_moment() {
    let falls = Trace::new(vec![Step { from: 0.0, value: 1e6 }, Step { from: 1.0, value: 1e5 }]).unwrap();
    let joins = Trace::new(vec![Step { from: 0.0, value: 0.0 }, Step { from: 0.5, value: 1.0 }]).unwrap();
    let mut network = network(wide(), vec![Port { rate: falls, competitors: joins, buffer: 8e5, ..port(0.0) }]);
    let connection = network.connect(vec![0], Trace::constant(0.0), Trace::constant(0.0));
    network.send(connection, 8e5, 1);
    // 0.5 s at 1 MB/s, 0.5 s at half of it, the rest at 50 kB/s; then 0.6 MB of the others at 100 kB/s.
    assert!(near(arrivals(&mut network)[0].1, 2.0 + 6.0));
}

/// From 1 s on, one flow of others.
fn one_other() -> Trace {
    Trace::new(vec![Step { from: 0.0, value: 0.0 }, Step { from: 1.0, value: 1.0 }]).unwrap()
}

#[test]
fn echoes_messages_and_looks_see_the_queue_of_others_alike() {
    let mut network = network(wide(), vec![Port { competitors: one_other(), buffer: 2e5, ..port(1e6) }]);
    let connection = network.connect(vec![0], Trace::constant(0.01), Trace::constant(0.01));
    let echo = |network: &mut Network<u32>, at: f64| {
        network.timer(at, 1);
        assert_eq!(network.advance(), Some(NetworkEvent::Timer(1)));
        network.datagram(connection, 100.0, 2);
        assert_eq!(network.advance(), Some(NetworkEvent::Delivered(2)));
        network.now() - at - 0.01 - 1e-4
    };
    let queue_s = 0.75 * 2e5 / 1e6;
    let look = |network: &Network<u32>, queue_s: f64| {
        let counted = network.tcp_info(connection);
        assert!(near(counted.path_s, 0.02) && near(counted.round_trip_s, 0.02 + queue_s), "{counted:?}");
    };
    assert!(near(echo(&mut network, 0.5), 0.0));
    look(&network, 0.0);
    // Nothing of ours is on its way.
    assert!(near(echo(&mut network, 2.0), queue_s));
    look(&network, queue_s);
    network.timer(3.0, 3);
    assert_eq!(network.advance(), Some(NetworkEvent::Timer(3)));
    network.send(connection, 1e5, 4);
    network.datagram(connection, 100.0, 5);
    look(&network, queue_s);
    let times = arrivals(&mut network);
    assert!(near(times[0].1, 3.0 + 0.01 + queue_s + 1e-4) && times[0].0 == 5, "{times:?}");
    assert!(near(times[1].1, 3.0 + 0.2 + 0.01 + queue_s), "half the rate, then the queue: {times:?}");
}

#[test]
fn windows_go_once_per_round_trip_through_the_queue_of_others() {
    let window = tcp().initial_window();
    let crowded = Port { competitors: Trace::constant(1.0), buffer: 1e8, ..port(1e9) };
    let mut network = network(tcp(), vec![crowded]);
    let connection = network.connect(vec![0], Trace::constant(0.01), Trace::constant(0.01));
    network.send(connection, 7.0 * window, 1);
    // 1 + 2 + 4 windows, each but the last for a round trip of 0.02 s and a queue of 0.075 s.
    let at = arrivals(&mut network)[0].1;
    assert!((at - 2.0 * 0.095 - 0.085).abs() < 1e-3, "{at}");
}

#[test]
fn of_a_full_queue_only_the_own_share_takes_windows() {
    let ended = |others: f64, bytes: f64| {
        let crowded = Port { competitors: Trace::constant(others), buffer: 2e5, ..port(1e6) };
        let mut network = network(Tcp { initial_segments: 100.0, ..tcp() }, vec![crowded]);
        let connection = network.connect(vec![0], Trace::constant(0.01), Trace::constant(0.01));
        network.send(connection, bytes, 1);
        arrivals(&mut network)[0].1
    };
    assert!(near(ended(0.0, 1.2e5), 0.13), "0.22 MB fit");
    // Of 1 MB/s for 0.17 s and what is left of the queue, half: 0.11 MB.
    assert!(near(ended(1.0, 1e5), 0.2 + 0.16));
    let lost = ended(1.0, 1.2e5);
    assert!(lost > 0.24 + 0.16 + 0.17, "{lost}");
}

#[test]
fn others_use_up_the_credit_of_a_token_bucket() {
    let burst = Some(Burst { bytes: 9e5, peak: 1e6 });
    let crowded = Port { burst, competitors: Trace::constant(1.0), buffer: 1e6, ..port(1e5) };
    let mut network = network(wide(), vec![crowded]);
    let connection = network.connect(vec![0], Trace::constant(0.0), Trace::constant(0.0));
    network.timer(2.0, 1);
    assert_eq!(network.advance(), Some(NetworkEvent::Timer(1)));
    network.send(connection, 1e5, 2);
    // Half of the rate, and a queue of 0.75 MB.
    assert!(near(arrivals(&mut network)[0].1, 2.0 + 2.0 + 7.5));
}

#[test]
fn windows_double_per_round_trip_and_halve_while_idle() {
    let (rtt, window) = (0.1, tcp().initial_window());
    let mut network = network(tcp(), vec![port(1e12)]);
    let connection = network.connect(vec![0], Trace::constant(rtt / 2.0), Trace::constant(rtt / 2.0));
    // 1 + 2 + 4 windows: the last leaves after two round trips.
    network.send(connection, 7.0 * window, 1);
    assert!((arrivals(&mut network)[0].1 - 2.5 * rtt).abs() < 1e-6);
    // At once the window of before is used; after seconds the first one again.
    network.send(connection, 4.0 * window, 2);
    let after = arrivals(&mut network)[0].1;
    assert!((after - 2.5 * rtt - 1.0 * rtt).abs() < 0.6 * rtt, "{after}");
    network.timer(after + 2.0, 9);
    assert_eq!(network.advance(), Some(NetworkEvent::Timer(9)));
    let began = network.now();
    network.send(connection, 7.0 * window, 3);
    assert!((arrivals(&mut network)[0].1 - began - 2.5 * rtt).abs() < 1e-6);
}

#[test]
fn a_token_bucket_lets_its_credit_go_at_the_peak() {
    let burst = Some(Burst { bytes: 9e5, peak: 1e6 });
    let mut network = network(wide(), vec![Port { burst, ..port(1e5) }]);
    let connection = network.connect(vec![0], Trace::constant(0.0), Trace::constant(0.0));
    network.send(connection, 1.2e6, 1);
    // The credit is used up after 1 s (0.9 MB and the 0.1 MB that came in); the rest goes at the rate.
    assert!(near(arrivals(&mut network)[0].1, 3.0));
}

#[test]
fn a_credit_comes_back_at_the_rate_of_its_time() {
    let burst = Some(Burst { bytes: 9e5, peak: 1e6 });
    let steps = [(0.0, 1e5), (2.0, 9e5), (2.1, 1e5)].map(|(from, value)| Step { from, value });
    let mut network = network(wide(), vec![Port { burst, rate: Trace::new(steps.to_vec()).unwrap(), ..port(0.0) }]);
    let connection = network.connect(vec![0], Trace::constant(0.0), Trace::constant(0.0));
    network.send(connection, 1e6, 1);
    assert!(near(arrivals(&mut network)[0].1, 1.0), "all of the credit");
    network.timer(2.1, 2);
    assert_eq!(network.advance(), Some(NetworkEvent::Timer(2)));
    network.send(connection, 3e5, 3);
    // 0.1 MB in one second and 0.09 MB in a tenth came back: they last for 0.19 / 0.9 s at the peak.
    let fast_s = 0.19 / 0.9;
    assert!(near(arrivals(&mut network)[0].1, 2.1 + fast_s + (3e5 - 1e6 * fast_s) / 1e5));
}

#[test]
fn many_senders_to_one_overflow_a_small_queue() {
    let run = |buffer: f64| {
        let ports = (0..9).map(|i| Port { buffer: if i == 8 { buffer } else { 1e12 }, ..port(1e7) }).collect();
        let mut network = network(tcp(), ports);
        for i in 0..8 {
            let connection = network.connect(vec![i, 8], Trace::constant(1e-4), Trace::constant(1e-4));
            network.send(connection, 14_480.0, i as u32);
        }
        arrivals(&mut network).last().unwrap().1
    };
    let (deep, shallow) = (run(1e6), run(2e4));
    assert!(deep < 0.013, "{deep}");
    assert!(shallow > 0.2, "{shallow}: no sender lost its tail");
}

proptest! {
    #[test]
    fn no_port_carries_more_than_its_rate_and_all_arrives_in_order(
        messages in prop::collection::vec((0usize..6, 1.0f64..1e6, 0.0f64..3.0), 1..40),
        rates in prop::collection::vec(1e4f64..1e7, 6),
        buffer in 1e4f64..1e7,
    ) {
        let ports = rates.iter().map(|&rate| Port { buffer, ..port(rate) }).collect();
        let mut network = network(tcp(), ports);
        let pairs = [(0, 3), (0, 4), (1, 4), (1, 5), (2, 3), (2, 5)];
        let connections: Vec<_> = pairs
            .iter()
            .map(|&(up, down)| network.connect(vec![up, down], Trace::constant(1e-3), Trace::constant(2e-3)))
            .collect();
        let mut sorted = messages.clone();
        sorted.sort_by(|a, b| a.2.total_cmp(&b.2));
        for (token, &(_, _, at)) in sorted.iter().enumerate() {
            network.timer(at, 1000 + token as u32);
        }
        let (mut arrived, mut last) = (Vec::new(), 0.0f64);
        while let Some(handle) = network.advance() {
            prop_assert!(network.now() >= last);
            last = network.now();
            match handle {
                NetworkEvent::Timer(token) => {
                    let token = token - 1000;
                    let (pair, bytes, _) = sorted[token as usize];
                    network.send(connections[pair], bytes, token);
                }
                NetworkEvent::Delivered(token) => arrived.push((token, network.now())),
            }
        }
        prop_assert_eq!(arrived.len(), sorted.len());
        for pair in 0..pairs.len() {
            let order: Vec<u32> = arrived.iter().map(|a| a.0).filter(|&t| sorted[t as usize].0 == pair).collect();
            prop_assert!(order.windows(2).all(|w| w[0] < w[1]), "{:?}", order);
        }
        for (port, rate) in rates.iter().enumerate() {
            let uses = |token: u32| { let (up, down) = pairs[sorted[token as usize].0]; up == port || down == port };
            let first = sorted.iter().enumerate().filter(|(t, _)| uses(*t as u32)).map(|(_, m)| m.2).next();
            let bytes: f64 = arrived.iter().filter(|a| uses(a.0)).map(|a| sorted[a.0 as usize].1).sum();
            let end = arrived.iter().filter(|a| uses(a.0)).map(|a| a.1).fold(0.0, f64::max);
            if let Some(first) = first {
                prop_assert!(end - first >= 0.999 * bytes / rate, "port {} carried {} bytes in {} s", port, bytes, end - first);
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_times(seed in any::<u64>()) {
        let run = || {
            let ports = (0..4).map(|_| Port { buffer: 3e4, ..port(1e6) }).collect();
            let mut network = Network::new(tcp(), ports, ChaCha8Rng::seed_from_u64(seed));
            for i in 0..3 {
                let connection = network.connect(vec![i, 3], Trace::constant(1e-3), Trace::constant(1e-3));
                network.send(connection, 1e5, i as u32);
            }
            arrivals(&mut network)
        };
        prop_assert_eq!(run(), run());
    }
}

#[test]
fn what_stays_on_a_machine_arrives_at_the_pace_of_a_copy() {
    let mut network = network(Tcp { stack_s: 30e-6, ..wide() }, vec![port(1e6)]);
    let connection = network.connect(Vec::new(), Trace::constant(0.0), Trace::constant(0.0));
    network.send(connection, 4e9, 1);
    network.send(connection, 4e9, 2);
    let times = arrivals(&mut network);
    assert!(near(times[0].1, 1.0 + 15e-6) && near(times[1].1, 2.0 + 15e-6), "{times:?}");
}

#[test]
fn a_look_at_a_connection_shows_what_left_and_whether_the_link_holds_it_up() {
    let mut network = network(tcp(), vec![port(1e6), port(1e6)]);
    let connection = network.connect(vec![0, 1], Trace::constant(0.01), Trace::constant(0.03));
    network.send(connection, 1e6, 1);
    network.timer(0.03, 2);
    network.timer(0.5, 3);
    assert_eq!(network.advance(), Some(NetworkEvent::Timer(2)));
    let slow_start = network.tcp_info(connection);
    assert!(near(slow_start.sent, 14_480.0) && near(slow_start.round_trip_s, 0.04), "{slow_start:?}");
    assert_eq!(network.advance(), Some(NetworkEvent::Timer(3)));
    let full = network.tcp_info(connection);
    assert!(
        near(full.sent + full.waiting, 1e6) && full.sent > 4e5 && full.round_trip_s >= 2.0 * full.path_s,
        "{full:?}"
    );
    assert!(matches!(network.advance(), Some(NetworkEvent::Delivered(1))));
    assert!(near(network.tcp_info(connection).sent, 1e6) && network.tcp_info(connection).round_trip_s == 0.04);
    // A window of many segments is forgotten by a connection that is opened again.
    let took = |network: &mut Network<u32>| {
        let from = network.now();
        network.send(connection, 5e4, 4);
        assert!(network.advance().is_some());
        network.now() - from
    };
    let warm = took(&mut network);
    network.reopen(connection);
    let cold = took(&mut network);
    assert!(cold > warm + 0.03, "{cold} against {warm}");
}

/// A window that grows no more leaves once per round trip, the last one as fast as the port lets it; what others leave is theirs.
#[test]
fn a_largest_window_goes_once_per_round_trip() {
    let tcp = Tcp { initial_segments: 1e6 / 1448.0, window_bytes: 1e6 - 1.0, ..tcp() };
    let mut network = network(tcp, vec![port(1e9), port(1e9), port(1e9)]);
    let far = network.connect(vec![0, 1], Trace::constant(0.05), Trace::constant(0.05));
    let near_by = network.connect(vec![0, 2], Trace::constant(0.0), Trace::constant(0.0));
    network.send(far, 1e7, 1);
    network.send(far, 5e5, 2);
    network.send(near_by, 0.9 * 0.99e9, 3);
    let times = arrivals(&mut network);
    let at = |token| times.iter().find(|(other, _)| *other == token).unwrap().1;
    // 10.5 windows: nine and a half round trips, and then the last window.
    assert!(near(at(3), 0.9), "1 % of the port is the other's: {times:?}");
    assert!(near(at(2), 0.95 + 1e6 / 1e9 + 0.05), "{times:?}");
    assert!(near(network.tcp_info(far).sent, 1.05e7));
    assert!(at(1) < at(2) && at(1) > 0.95 + 0.05, "{times:?}");
    let mut many = Network::new(tcp, vec![port(1e9)], ChaCha8Rng::seed_from_u64(1));
    let far = many.connect(vec![0], Trace::constant(0.05), Trace::constant(0.05));
    many.send(far, 1e15, 1);
    let times = arrivals(&mut many);
    assert!(near(times[0].1, 0.1 * (1e9 - 1.0) + 1e-3 + 0.05), "without an event per window: {times:?}");
}

#[test]
fn heads_and_acknowledgements_take_their_part_of_a_port() {
    let mut network = network(Tcp { overhead_bytes: 144.8, ..wide() }, vec![port(1e6)]);
    let id = network.connect(vec![0], Trace::constant(0.0), Trace::constant(0.0));
    network.send(id, 1e6, 7);
    assert_eq!(network.advance(), Some(NetworkEvent::Delivered(7)));
    assert!((network.now() - 1.1).abs() < 1e-6, "{}", network.now());
    assert!((network.tcp_info(id).sent - 1e6).abs() < 1.0);
}

/// A clock that begins before 0 finds everything as it is at 0, and stands at the moment to which it is led.
#[test]
fn a_clock_may_begin_before_the_traces_do() {
    let arrive = |begins: f64| {
        let steps = vec![Step { from: 0.0, value: 1e6 }, Step { from: 5.0, value: 2e6 }];
        let rate = Trace::new(steps).unwrap();
        let burst = Some(Burst { bytes: 1e6, peak: 4e6 });
        let rng = ChaCha8Rng::seed_from_u64(1);
        let mut network = Network::beginning_at(begins, tcp(), vec![Port { rate, burst, ..port(1e6) }], rng);
        let id = network.connect(vec![0], Trace::constant(0.01), Trace::constant(0.01));
        for (token, at) in [(1, begins), (2, begins + 1.0), (3, begins + 3.0)] {
            assert_eq!(network.advance_before(at), None);
            assert_eq!(network.now(), at);
            network.send(id, 1e5, token);
            let arrived = network.advance_before(at + 0.9);
            assert_eq!(arrived, Some(NetworkEvent::Delivered(token)));
        }
        let within = network.now() - begins;
        network.send(id, 1e7 - begins * 1e6, 4);
        assert_eq!(network.advance(), Some(NetworkEvent::Delivered(4)));
        (within, network.now())
    };
    let ((within, end), (sooner_within, sooner_end)) = (arrive(0.0), arrive(-20.0));
    assert!(near(within, sooner_within), "{within} s, {sooner_within} s");
    // 20 s more at the first rate, for 20 MB more: what begins 20 s sooner ends at the same moment.
    assert!((end - sooner_end).abs() < 1e-3, "{end} s, {sooner_end} s");
}

/// What is left of a message for less time than the clock can show is none.
#[test]
fn a_late_clock_goes_on() {
    let mut network = network(Tcp { window_bytes: 6e6, ..tcp() }, vec![port(12.5e9)]);
    let id = network.connect(vec![0], Trace::constant(1e-4), Trace::constant(1e-4));
    network.timer(1e6, 0);
    assert_eq!(network.advance(), Some(NetworkEvent::Timer(0)));
    for number in 1..200 {
        network.send(id, 1e7 / f64::from(number).sqrt() + 0.3, number);
        assert_eq!(network.advance(), Some(NetworkEvent::Delivered(number)));
    }
}
