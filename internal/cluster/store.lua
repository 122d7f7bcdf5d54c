-- SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
--
-- The store's side of the leases: one request of one host for each key, each in one atomic step.
--
-- KEYS: a hash for each cluster. Its field '' is the state, its other fields are the members.
-- ARGV: for each key the member and its request. Answers are in the same order.
--
-- A claim is the largest rate that a member may be using: what it had when it asked, or what it was granted since. The
-- safe claim is the same for the rate that the member has after its lease. The sum of all claims is never above the
-- rate, and neither is that of the safe claims. So a member gets more only after others have told that they use less,
-- or after their leases have ended.
--
-- No clock of the store is used: it may be set, and this process may be stopped. Requests have an order. A member says
-- when it sent a request and when it heard the answer to an earlier one, by its monotonic clock. So there was at least
-- `sent - heard` between the earlier request here and this one, and at most `sent - sent` between the earlier one and
-- the sending of this one. Some of a member's earlier requests are kept as anchors. They tell:
--
--	lapsed	Requests up to this one are older than LEASE. So are leases that they got.
--	horizon	Requests from this one on came at most SILENT before the member sent what it asks now.
--
-- A member whose lease is smaller than its safe share begins to use that RISE after the answer that granted it. So the
-- member that asks counts only on those that have proven, from the horizon on, that they got such an answer. Its own
-- lease ends at most SILENT + LEASE after these answers, and RISE is longer. An old request, which was held up on its
-- way, proves nothing.

local VERSION = 1
local LEASE, SILENT = 2000000, 3500000 -- us: how long a lease lasts; see above. RISE is in cluster.go
local EARLY = 500000 -- us: by how much the others make room before a member's lease has ended
local ANCHORS, SPACING = 6, 1000000 -- how many a member has, and us between two of them, or one interval
local SLOW, FAST = 1000000, 200000 -- us between two requests, and while rates are still changing
local NONE = 2 ^ 53
local LEAST = 8000 -- bits per second: every member has this much
local STIR = 3 -- for so many requests of each member all ask again soon when the level has changed
local FLOORS = 100 -- a member's default floor is this part of an equal share

local OK, OLD, REPLACED, NEWER, QUIET = 0, 1, 2, 3, 4

-- A request. cluster.go says what each field means.
local ASK = '>' .. string.rep('d', 19)
local A = {speaks = 1, boot = 2, turn = 3, seq = 4, epoch = 5, sent = 6, heard = 7, answered = 8, has = 9, safe = 10,
	granted = 11, known = 12, rate = 13, weight = 14, floor = 15, share = 16, wants = 17, demand = 18, use = 19}

-- A member. A scan reads the first fields only. The anchors follow: order, sent and heard of each, the oldest first.
local SCANNED = '>' .. string.rep('d', 12)
local FIELDS = 23
local MEMBER = '>' .. string.rep('d', FIELDS + 3 * ANCHORS)
local M = {version = 1, order = 2, proven = 3, claim = 4, safe = 5, rate = 6, weight = 7, floor = 8, share = 9,
	wants = 10, demand = 11, speaks = 12, boot = 13, turn = 14, seq = 15, sent = 16, counted = 17, lost = 18, lease = 19,
	use = 20, has = 21, hasSafe = 22, clock = 23}

-- The state of a cluster. The identity of the server follows.
local S = {version = 1, epoch = 2, order = 3, lapsed = 4, early = 5, silent = 6, scanned = 7, scannedLapsed = 8,
	scannedSilent = 9, oldest = 10, oldestProven = 11, asked = 12, changed = 13, members = 14, rate = 15, claims = 16,
	safes = 17, level = 18, spare = 19, fixed = 20, pressed = 21, equal = 22, wanted = 23, known = 24, seen = 25,
	moved = 26}
local STATE = '>' .. string.rep('d', 26)
local STATE_BYTES = 26 * 8

local floor, min, max = math.floor, math.min, math.max

-- Which process of Redis this is, and as whose primary: after a restart or failover, writes may be lost.
local function server()
	local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
	local replication = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
	return (run or '') .. (replication or '')
end

-- What a member counts in the sum of claims, when it is known which requests have lapsed and who is silent.
local function counts(m, lapsed, silent)
	if m[M.order] <= lapsed or m[M.claim] < m[M.safe] and m[M.proven] <= silent then return m[M.safe] end
	return m[M.claim]
end

local function least_of(m, s)
	local own = m[M.floor]
	if own > 0 then return own end
	return max(LEAST, floor(s[S.rate] / s[S.members] / FLOORS))
end

-- What hosts that the store has lost, and that have not come back, may be using as their safe shares.
local function missing(s) return max(0, s[S.known] - s[S.seen]) end

-- The level of weighted max-min fairness: the sum of max(least, min(demand, weight * level)) is free. All sums are of
-- whole numbers, so their order does not matter.
local function find_level(list, free, weights)
	local low, high, level = 0, free, free / weights
	for _ = 1, 60 do
		local sum, open = 0, 0
		for i = 1, #list do
			local p = list[i]
			local part = p.weight * level
			if part >= p.demand then
				sum = sum + p.demand
			elseif part <= p.least then
				sum = sum + p.least
			else
				open = open + p.weight
			end
		end
		local rest = free - sum - open * level
		if rest >= 0 then low = level else high = level end
		if rest > -1 and rest < 1 then return level end
		local step = level + rest / open
		if open > 0 and step > low and step < high then level = step else level = (low + high) / 2 end
	end
	return low
end

local function differs(a, b, by) return a > b * by or b > a * by end

-- Looks at all members but the asking one, whose claims are left out of the sums, and finds the level.
local function scan(key, s, name, own)
	local stored, others, lapsed, silent = redis.call('HGETALL', key), {}, s[S.lapsed], s[S.silent]
	s[S.members], s[S.rate], s[S.claims], s[S.safes] = 1, own[M.rate], 0, 0
	s[S.oldest], s[S.oldestProven] = NONE, NONE
	local speaks, wants, wanting = own[M.speaks], own[M.wants], own[M.wants] > 0 and 1 or 0
	for i = 1, #stored, 2 do
		if stored[i] ~= '' and stored[i] ~= name then
			local m = {struct.unpack(SCANNED, stored[i + 1])}
			others[#others + 1] = m
			s[S.members] = s[S.members] + 1
			s[S.safes] = s[S.safes] + m[M.safe]
			s[S.claims] = s[S.claims] + counts(m, lapsed, silent)
			if m[M.wants] > 0 then wants, wanting = wants + m[M.wants], wanting + 1 end
			if m[M.order] > lapsed then
				s[S.oldest] = min(s[S.oldest], m[M.order])
				if m[M.claim] < m[M.safe] and m[M.proven] > silent then
					s[S.oldestProven] = min(s[S.oldestProven], m[M.proven])
				end
				s[S.rate] = min(s[S.rate], m[M.rate])
				speaks = min(speaks, m[M.speaks])
			end
		end
	end
	s[S.version] = max(s[S.version], min(VERSION, speaks))
	local all = max(0, s[S.rate] - missing(s))
	local free, fixed, least, demand, weights, list = all, 0, 0, 0, 0, {}
	others[#others + 1] = own
	for i = 1, #others do
		local m = others[i]
		if m ~= own and m[M.order] <= s[S.early] then
			free = free - max(counts(m, lapsed, silent), m[M.safe])
		elseif m[M.share] > 0 then
			fixed = fixed + m[M.share]
		else
			local p = {weight = m[M.weight], least = least_of(m, s)}
			p.demand = max(m[M.demand], p.least)
			list[#list + 1] = p
			least, demand, weights = least + p.least, demand + p.demand, weights + p.weight
		end
	end
	free = max(0, free)
	s[S.fixed] = fixed > free and free / fixed or 1
	free = max(0, free - floor(fixed * s[S.fixed]))
	s[S.pressed] = least > free and free / least or 1
	local level = s[S.level]
	s[S.level], s[S.spare] = NONE, 0
	if least > free then
		s[S.level] = 0
	elseif demand > free then
		s[S.level] = find_level(list, free, weights)
	elseif weights > 0 then
		s[S.spare] = (free - demand) / weights
	end
	if differs(s[S.level], level, 1.02) then s[S.moved] = s[S.order] end
	s[S.wanted] = wants > all and all / wants or 1
	s[S.equal] = wanting < s[S.members] and floor(max(0, all - wants) / (s[S.members] - wanting)) or 0
	s[S.scanned], s[S.scannedLapsed], s[S.scannedSilent] = s[S.order], lapsed, silent
	s[S.asked], s[S.changed] = 0, 0
end

-- The lease that a member should have in the end.
local function goal_of(m, s)
	if m[M.share] > 0 then return floor(m[M.share] * s[S.fixed]) end
	local least = least_of(m, s) * s[S.pressed]
	local demand = max(m[M.demand], least)
	if s[S.level] == NONE then return floor(demand + m[M.weight] * s[S.spare]) end
	return floor(max(least, min(demand, m[M.weight] * s[S.level])))
end

local function has_changed(m, before)
	if not before then return true end
	for _, field in ipairs({M.rate, M.weight, M.floor, M.share, M.wants, M.speaks}) do
		if m[field] ~= before[field] then return true end
	end
	return differs(m[M.demand], before[M.demand], 1.02)
end

local function answer(status, turn, epoch, lease, safe, again, known, members, rate, goal)
	return struct.pack('>dddddddddd', status, turn, epoch, lease, safe, again, known, members, rate, goal)
end

local function refuse(status, s) return answer(status, 0, s[S.epoch], 0, 0, SLOW, 0, 0, 0, 0) end

-- Takes the anchors of the member that asks into account. Returns its horizon.
local function look_back(s, anchors, sent)
	local horizon, spans = NONE, false
	for i = 1, #anchors, 3 do
		local order, elapsed = anchors[i], sent - anchors[i + 2]
		if elapsed >= LEASE then s[S.lapsed] = max(s[S.lapsed], order) end
		if elapsed >= LEASE - EARLY then s[S.early] = max(s[S.early], order) end
		if sent - anchors[i + 1] > SILENT then spans = true else horizon = min(horizon, order) end
	end
	if spans and horizon < NONE then s[S.silent] = max(s[S.silent], horizon - 1) end
	return horizon
end

local function renew(key, name, q, here, clock)
	local stored = redis.call('HMGET', key, '', name)
	local s, before, was
	if stored[1] then
		s, was = {struct.unpack(STATE, stored[1])}, string.sub(stored[1], STATE_BYTES + 1)
		if s[S.version] > VERSION then return refuse(NEWER, s) end
		if stored[2] then before = {struct.unpack(MEMBER, stored[2])} end
	end
	if was ~= here or q[A.epoch] > s[S.epoch] then
		-- The store was emptied, or may have lost writes. Leases from before may last for one lease length.
		redis.call('DEL', key)
		local epoch = max(s and s[S.epoch] or 0, q[A.epoch]) + 1
		s, before = {}, nil
		for _, field in pairs(S) do s[field] = 0 end
		s[S.epoch] = epoch
	end
	local turn, has, safe, anchors, proven, lost = q[A.turn], q[A.has], q[A.safe], {}, 0, 0
	if before then
		local same = turn == before[M.turn]
		if turn ~= 0 and not same then return refuse(REPLACED, s) end
		if same and q[A.seq] <= before[M.seq] then return refuse(OLD, s) end
		if q[A.boot] == before[M.boot] then
			for i = FIELDS + 1, FIELDS + 3 * ANCHORS, 3 do
				if before[i] > 0 then
					for j = i, i + 2 do anchors[#anchors + 1] = before[j] end
				end
			end
		end
		local counted = before[M.counted]
		if before[M.order] <= s[S.scanned] then counted = counts(before, s[S.scannedLapsed], s[S.scannedSilent]) end
		s[S.claims], s[S.safes] = s[S.claims] - counted, s[S.safes] - before[M.safe]
		if same then
			proven, lost = before[M.proven], before[M.lost]
			if q[A.answered] == before[M.seq] then
				if lost > 0 then s[S.seen], lost = s[S.seen] + q[A.safe], 0 end
				if before[M.lease] >= 0 then proven = before[M.order] end
				local n = #anchors
				if n == 0 or q[A.sent] - anchors[n - 1] >= SPACING then
					if n == 3 * ANCHORS then
						for _ = 1, 3 do table.remove(anchors, 1) end
						n = n - 3
					end
					anchors[n + 1], anchors[n + 2], anchors[n + 3] = before[M.order], before[M.sent], q[A.heard]
				end
			end
		else
			-- A new process of the member. A late request of the one before must not lower its claims.
			turn = before[M.turn] + 1
			has, safe = max(has, counted), max(safe, before[M.safe])
		end
	else
		turn = max(turn, 1)
		s[S.known] = max(s[S.known], q[A.known])
		if q[A.epoch] ~= s[S.epoch] then lost = q[A.granted] end
		s[S.members] = s[S.members] + 1
	end
	s[S.order] = s[S.order] + 1
	local horizon = look_back(s, anchors, q[A.sent])
	if q[A.rate] == 0 then -- it leaves
		redis.call('HDEL', key, name)
		if not before then s[S.seen] = s[S.seen] + q[A.safe] end -- an operator says that what is missing is gone
		s[S.members], s[S.changed] = s[S.members] - 1, s[S.changed] + 1
		redis.call('HSET', key, '', struct.pack(STATE, unpack(s)) .. here)
		return answer(OK, turn, s[S.epoch], 0, 0, SLOW, 0, s[S.members], s[S.rate], 0)
	end
	local m = {VERSION, s[S.order], proven, has, safe, q[A.rate], q[A.weight], q[A.floor], q[A.share], q[A.wants],
		q[A.demand], q[A.speaks], q[A.boot], turn, q[A.seq], q[A.sent], 0, lost, -1, q[A.use], q[A.has], q[A.safe],
		clock}
	s[S.asked] = s[S.asked] + 1
	if has_changed(m, before) then s[S.changed] = s[S.changed] + 1 end
	if s[S.rate] == 0 or s[S.lapsed] >= s[S.oldest] or s[S.silent] >= s[S.oldestProven] or
		s[S.oldestProven] < horizon and horizon < NONE and s[S.lapsed] > 0 or s[S.changed] > 0 and s[S.asked] * 8 >= s[S.members] then
		scan(key, s, name, m)
	end
	local all = max(0, s[S.rate] - missing(s))
	local goal, status, again, lease = goal_of(m, s), OK, SLOW, 0
	if s[S.lapsed] == 0 then
		status, again = QUIET, FAST
	else
		local granted = q[A.wants] > 0 and floor(q[A.wants] * s[S.wanted]) or s[S.equal]
		granted = max(0, min(granted, all - s[S.safes]))
		if lost > 0 then granted = min(granted, safe) end
		lease = goal
		if lease > has then
			lease = min(lease, max(2 * has, safe, least_of(m, s)))
		elseif q[A.use] > has / 2 then -- TCP needs some round-trip times to follow
			lease = max(lease, floor(has / 2))
		end
		if s[S.oldestProven] < horizon then lease = min(lease, granted) end
		lease = max(0, min(lease, all - s[S.claims]))
		if lease < has and differs(lease, has, 1.02) or differs(lease, goal, 1.02) or granted < safe or
			before and differs(m[M.demand], before[M.demand], 1.125) or
			s[S.order] - s[S.moved] < STIR * s[S.members] then again = FAST end
		m[M.lease], m[M.claim] = lease, max(has, lease)
		safe, m[M.safe] = granted, max(safe, granted)
	end
	m[M.counted] = counts(m, s[S.lapsed], s[S.silent])
	s[S.claims], s[S.safes] = s[S.claims] + m[M.counted], s[S.safes] + m[M.safe]
	if m[M.counted] < m[M.safe] then s[S.oldestProven] = min(s[S.oldestProven], proven) end
	for i = 1, 3 * ANCHORS do m[FIELDS + i] = anchors[i] or 0 end
	redis.call('HSET', key, '', struct.pack(STATE, unpack(s)) .. here, name, struct.pack(MEMBER, unpack(m)))
	return answer(status, turn, s[S.epoch], lease, safe, again, s[S.safes] + missing(s), s[S.members], s[S.rate], goal)
end

local answers, here, clock = {}, server(), tonumber(redis.call('TIME')[1]) -- for people only
for i, key in ipairs(KEYS) do
	answers[i] = renew(key, ARGV[2 * i - 1], {struct.unpack(ASK, ARGV[2 * i])}, here, clock)
end
return answers
