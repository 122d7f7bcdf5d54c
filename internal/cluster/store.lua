-- SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
--
-- The store's side of the leases: one request of one host for each key, each in one atomic step.
--
-- KEYS: a hash for each cluster. Its field '' is the state, its other fields are the members. Those that left have a tab before
-- their names, as long as what they used of the quota counts.
-- ARGV: for each key the member and its request. Answers are in the same order.
--
-- A claim is the largest rate that a member may be using: what it had when it asked, or what it was granted since. The
-- safe claim is the same for the rate that the member has after its lease. The sum of all claims is never above the
-- rate, and neither is that of the safe claims. So a member gets more only after others have told that they use less,
-- or after their leases have ended.
--
-- No lease depends on a clock of the store: it may be set, and this process may be stopped. Requests are numbered instead:
-- `order`. A member knows the order of its own earlier requests, and when it sent them and heard the answers by its monotonic
-- clock. So it tells how old requests are, its own and all that came before them:
--
--	lapsed	requests up to this one are older than a lease can be; so are leases that they got
--	horizon	this one and later ones came at most `silence` before the member sent what it asks now
--
-- (Length, silence and Rise are in cluster.go.) A member whose lease is smaller than its safe share begins to use that
-- `Rise` after the answer that granted it. So the member that asks counts only on those that have proven, from the horizon
-- on, that they got such an answer. Its own lease ends at most silence + Length after these answers, and Rise is longer.
-- An old request, which was held up on its way, proves nothing.
--
-- Of a quota, a member may use up to its limit in each period. The sum of all limits, and of what members used that are gone or
-- had another instance, is `spent`, and never above the quota. A limit lasts until its member tells of another one, also in the
-- next period: with it, the member may use as much again. So a period may begin on hosts at different times.

local VERSION = 1
local SLOW, FAST = 1000000, 200000 -- us between two requests, and while rates are still changing
local ACK = 20000 -- us until a member tells that it uses less
local MANY = 100 -- with more members than that, changes are noticed later, so that the store has less to do
local NONE = 2 ^ 53
local LEAST = 8000 -- bits per second: every member has this much
local STIR = 4 -- for so many requests of each member all ask again soon when the level has changed
local FORGET = 60 -- seconds by the store's clock after which an operator may forget any member: perhaps all have ended
local FLOORS = 100 -- a member's default floor is this part of an equal share
local GRANT, LEAST_GRANT = 600, 2 -- s: how long a member can go on as now with what it is granted of the quota, or at the whole rate
local AHEAD = 2 -- days by which a member's day may be ahead: in the east it is there earlier

local OK, OLD, REPLACED, NEWER, QUIET, BROKEN, LIVE = 0, 1, 2, 3, 4, 5, 6

-- Parts of the errors with which Redis refuses commands: no memory, a replica, and rights that a user lacks.
local REFUSALS = {'OOM', 'READONLY', 'NOREPLICAS', 'NOPERM', "can't run this command"}

-- The format of so many numbers, and its size.
local function fields(n) return {format = '<' .. string.rep('d', n), bytes = 8 * n} end

-- A request. cluster.go says what each field means.
local ASK = fields(28)
local A = {speaks = 1, turn = 2, seq = 3, epoch = 4, answered = 5, lapsed = 6, early = 7, silent = 8, horizon = 9,
	has = 10, safe = 11, granted = 12, known = 13, rate = 14, weight = 15, floor = 16, share = 17, wants = 18,
	demand = 19, keeps = 20, use = 21, new = 22, quota = 23, day = 24,
	instance = 25, used = 26, limit = 27, spent = 28}

-- A member. A scan reads the first fields only.
local SCANNED = fields(12)
local MEMBER = fields(25)
local M = {version = 1, order = 2, proven = 3, claim = 4, safe = 5, rate = 6, weight = 7, floor = 8, share = 9,
	wants = 10, demand = 11, speaks = 12, turn = 13, seq = 14, counted = 15, lost = 16, lease = 17, use = 18, clock = 19,
	quota = 20, day = 21, instance = 22, earlier = 23, used = 24, limit = 25}

local ANSWER = fields(14)

-- The state of a cluster. Before it are the identity of the server and a zero byte.
local S = {version = 1, epoch = 2, order = 3, lapsed = 4, early = 5, silent = 6, scanned = 7, scannedLapsed = 8,
	scannedSilent = 9, oldest = 10, oldestProven = 11, asked = 12, changed = 13, members = 14, rate = 15, claims = 16,
	safes = 17, level = 18, spare = 19, fixed = 20, pressed = 21, equal = 22, wanted = 23, known = 24, seen = 25,
	moved = 26, unseen = 27, day = 28, spent = 29, spentKnown = 30, spentSeen = 31}
local STATE = fields(31)

local floor, min, max = math.floor, math.min, math.max

-- Fields are only ever added at the end, and a build writes none that it does not know. So records may be shorter than
-- they should be; what is missing is 0. If a field gets another meaning, VERSION is raised: builds write records of the
-- highest version that all live members speak.
local function numbers(of, record, at)
	local missing = of.bytes - (#record - at + 1)
	if missing > 0 then record = record .. string.rep('\0', missing) end
	return {struct.unpack(of.format, record, at)}
end

-- Which process of Redis this is, and as whose primary: after a restart or failover, writes may be lost.
local function server()
	local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
	local replication = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
	return (run or '') .. (replication or '')
end

local function is_member(field) return string.find(field, '^[^\t]') end

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

-- What hosts that the store has lost, and that have not come back, may use of the quota.
local function unseen(s) return max(0, s[S.spentKnown] - s[S.spentSeen]) end

-- Takes what a member may use of the quota out of the sum, and returns what its instances before the one that asks may have used,
-- and what another process or an older request of this instance may have made of its limit.
local function take_out(key, s, name, before, turn, q, clock)
	if q[A.day] > s[S.day] and q[A.day] < clock / 86400 + AHEAD then
		s[S.spentKnown] = missing(s) > 0 and unseen(s) or 0
		s[S.day], s[S.spent], s[S.spentSeen] = q[A.day], 0, 0
		local stored = redis.call('HGETALL', key)
		for i = 1, #stored, 2 do
			if is_member(stored[i]) then
				s[S.spent] = s[S.spent] + numbers(MEMBER, stored[i + 1], 1)[M.limit]
			elseif stored[i] ~= '' then
				redis.call('HDEL', key, stored[i])
			end
		end
	end
	if q[A.epoch] ~= s[S.epoch] and q[A.day] == s[S.day] then s[S.spentKnown] = max(s[S.spentKnown], q[A.spent]) end
	if not before then
		local left = redis.call('HMGET', key, '\t' .. name)[1]
		if not left then return 0, 0 end
		redis.call('HDEL', key, '\t' .. name)
		before, turn = numbers(MEMBER, left, 1), NONE
	end
	local earlier, limit = before[M.day] == s[S.day] and before[M.earlier] or 0, before[M.limit]
	s[S.spent] = s[S.spent] - earlier - limit
	if q[A.instance] == before[M.instance] then return earlier, turn ~= before[M.turn] and limit or 0 end
	return earlier + limit - (q[A.limit] == 0 and min(q[A.used], limit) or 0), 0
end

-- The limit of a member: what it used, and a part of what is left.
local function limit_of(s, q, earlier, quiet)
	if quiet or q[A.day] ~= s[S.day] or q[A.quota] == 0 then return q[A.limit] end
	local left = q[A.quota] - s[S.spent] - unseen(s) - earlier - q[A.used]
	local wants = max(q[A.use] / 8 * GRANT, q[A.rate] / 8 * LEAST_GRANT)
	return q[A.used] + max(0, floor(min(left / (2 * s[S.members]), wants)))
end

local function differs(a, b, by) return a > b * by or b > a * by end

-- Looks at all members but the asking one, whose claims are left out of the sums, and finds the level.
local function scan(key, s, name, own)
	local stored, others, lapsed, silent = redis.call('HGETALL', key), {}, s[S.lapsed], s[S.silent]
	s[S.members], s[S.rate], s[S.claims], s[S.safes] = 1, own[M.rate], 0, 0
	s[S.oldest], s[S.oldestProven] = NONE, NONE
	local speaks, wants, wanting = own[M.speaks], own[M.wants], own[M.wants] > 0 and 1 or 0
	for i = 1, #stored, 2 do
		if is_member(stored[i]) and stored[i] ~= name then
			local m = numbers(SCANNED, stored[i + 1], 1)
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
	return not before or m[M.rate] ~= before[M.rate] or m[M.weight] ~= before[M.weight] or
		m[M.floor] ~= before[M.floor] or m[M.share] ~= before[M.share] or m[M.wants] ~= before[M.wants] or
		m[M.speaks] ~= before[M.speaks] or differs(m[M.demand], before[M.demand], 1.02)
end

local function answer(status, turn, s, lease, safe, again, known, goal, limit)
	return struct.pack(ANSWER.format, status, turn, s[S.epoch], s[S.order], lease, safe, again, known, s[S.members],
		s[S.rate], goal, limit, s[S.spent] + unseen(s), s[S.day])
end

local function refuse(status, s) return answer(status, 0, s, 0, 0, SLOW, 0, 0, 0) end

local function soon(s) return min(SLOW, floor(FAST * max(1, s[S.members] / MANY))) end

local function renew(key, name, q, here, clock)
	local stored = redis.call('HMGET', key, '', name)
	local s, before, was
	if stored[1] then
		local zero = string.find(stored[1], '\0', 1, true)
		s, was = numbers(STATE, stored[1], zero + 1), string.sub(stored[1], 1, zero - 1)
		if s[S.version] > VERSION then return refuse(NEWER, s) end
		if stored[2] then before = numbers(MEMBER, stored[2], 1) end
	end
	if was ~= here then
		-- The store was emptied, or may have lost writes. Leases from before may last for one lease length.
		redis.call('DEL', key)
		s, before = {}, nil
		for _, field in pairs(S) do s[field] = 0 end
		s[S.epoch] = q[A.new]
	end
	local turn, has, safe, proven, lost, horizon = q[A.turn], q[A.has], q[A.safe], 0, 0, NONE
	if before then
		local same = turn == before[M.turn]
		if turn ~= 0 and not same then return refuse(REPLACED, s) end
		if turn == 0 and q[A.rate] == 0 and before[M.order] > s[S.lapsed] and clock - before[M.clock] < FORGET then
			return refuse(LIVE, s)
		end
		if same and q[A.seq] <= before[M.seq] then return refuse(OLD, s) end
		local counted = before[M.counted]
		if before[M.order] <= s[S.scanned] then counted = counts(before, s[S.scannedLapsed], s[S.scannedSilent]) end
		s[S.claims], s[S.safes] = s[S.claims] - counted, s[S.safes] - before[M.safe]
		lost = before[M.lost]
		if same then
			proven = before[M.proven]
			if q[A.answered] == before[M.seq] then
				if lost > 0 then
					s[S.seen], s[S.unseen], s[S.changed], lost = s[S.seen] + q[A.safe], s[S.unseen] - lost, s[S.changed] + 1, 0
					if q[A.limit] > 0 then s[S.spentSeen] = s[S.spentSeen] + max(q[A.used], q[A.limit]) end
				end
				if before[M.lease] >= 0 then proven = before[M.order] end
			end
		else
			-- A new process of the member. A late request of the one before must not lower its claims.
			turn = q[A.new]
			has, safe = max(has, counted), max(safe, before[M.safe])
		end
	else
		if turn == 0 then turn = q[A.new] end
		if q[A.epoch] ~= s[S.epoch] then -- else an operator has forgotten it
			s[S.known] = max(s[S.known], q[A.known])
			if q[A.granted] > 0 then s[S.unseen], lost = s[S.unseen] + safe, safe end
		end
		s[S.members] = s[S.members] + 1
	end
	s[S.order] = s[S.order] + 1
	if q[A.epoch] == s[S.epoch] then
		s[S.lapsed], s[S.early] = max(s[S.lapsed], q[A.lapsed]), max(s[S.early], q[A.early])
		s[S.silent], horizon = max(s[S.silent], q[A.silent]), q[A.horizon]
	end
	if q[A.rate] == 0 then -- it leaves, or an operator forgets it, who does not know its turn
		redis.call('HDEL', key, name)
		if before and before[M.earlier] + before[M.limit] > 0 then redis.call('HSET', key, '\t' .. name, stored[2]) end
		if q[A.seq] == 0 and not before then s[S.seen] = s[S.seen] + q[A.safe] end -- an operator says that what is missing is gone
		s[S.unseen] = s[S.unseen] - lost
		s[S.members], s[S.changed] = s[S.members] - 1, s[S.changed] + 1
		if s[S.members] == 0 and missing(s) + s[S.spent] == 0 then
			redis.call('DEL', key)
		else
			redis.call('HSET', key, '', here .. '\0' .. struct.pack(STATE.format, unpack(s)))
		end
		return answer(OK, turn, s, 0, 0, SLOW, 0, 0, 0)
	end
	local earlier, least = take_out(key, s, name, before, turn, q, clock)
	local m = {VERSION, s[S.order], proven, has, safe, q[A.rate], q[A.weight], q[A.floor], q[A.share], q[A.wants],
		q[A.demand], q[A.speaks], turn, q[A.seq], 0, lost, -1, q[A.use], clock,
		q[A.quota], s[S.day], q[A.instance], earlier, q[A.used], 0}
	s[S.asked] = s[S.asked] + 1
	if has_changed(m, before) then s[S.changed] = s[S.changed] + 1 end
	local scans = s[S.members] > MANY and 2 or 8 -- in the time in which each member asks once
	if s[S.rate] == 0 or s[S.lapsed] >= s[S.oldest] or s[S.silent] >= s[S.oldestProven] or
		s[S.oldestProven] < horizon and horizon < NONE and s[S.lapsed] > 0 or
		s[S.changed] > 0 and s[S.asked] * scans >= s[S.members] then
		scan(key, s, name, m)
	end
	local all = max(0, s[S.rate] - missing(s))
	local goal, status, again, lease = goal_of(m, s), OK, SLOW, 0
	if s[S.lapsed] == 0 then
		status, again = QUIET, soon(s)
	else
		local granted = q[A.wants] > 0 and floor(q[A.wants] * s[S.wanted]) or s[S.equal]
		granted = max(0, min(granted, all - s[S.safes]))
		if lost > 0 then granted = q[A.safe] end -- it is still reserved
		lease = max(goal, min(has, q[A.keeps]))
		if s[S.oldestProven] < horizon then lease = min(lease, granted) end
		lease = max(0, min(lease, all - s[S.claims]))
		local lowered = lease < has and differs(lease, has, 1.02)
		if lowered and max(lease, LEAST) < has and not (before and before[M.lease] == lease) then
			again = ACK -- else it cannot have less: perhaps it has LEAST already
		elseif lowered or differs(lease, goal, 1.02) or granted < safe or
			before and differs(m[M.demand], before[M.demand], 1.125) or
			s[S.order] - s[S.moved] < STIR * s[S.members] then
			again = soon(s)
		end
		m[M.lease], m[M.claim] = lease, max(has, lease)
		safe, m[M.safe] = granted, max(safe, granted)
	end
	m[M.counted] = counts(m, s[S.lapsed], s[S.silent])
	s[S.claims], s[S.safes] = s[S.claims] + m[M.counted], s[S.safes] + m[M.safe]
	if m[M.counted] < m[M.safe] then s[S.oldestProven] = min(s[S.oldestProven], proven) end
	local limit = limit_of(s, q, earlier, status == QUIET or lost > 0)
	m[M.limit] = max(q[A.used], q[A.limit], limit, least)
	s[S.spent] = s[S.spent] + earlier + m[M.limit]
	local sum = lease + safe + goal + s[S.claims] + s[S.safes] + s[S.spent]
	if sum - sum ~= 0 then error() end -- somebody else has written records
	redis.call('HSET', key, '', here .. '\0' .. struct.pack(STATE.format, unpack(s)), name, struct.pack(MEMBER.format, unpack(m)))
	-- What is missing has the safe shares of members that have not yet got an answer, which are also among the others.
	local known = s[S.safes] + max(0, missing(s) - s[S.unseen])
	return answer(status, turn, s, lease, safe, again, known, goal, limit)
end

local answers, here, clock = {}, server(), tonumber(redis.call('TIME')[1]) -- for what people see and forget only
for i, key in ipairs(KEYS) do
	local done, result = pcall(renew, key, ARGV[2 * i - 1], numbers(ASK, ARGV[2 * i], 1), here, clock)
	-- What somebody else has put there must not cost other clusters their leases. Redis itself refuses all of them alike.
	local why = not done and (type(result) == 'table' and result.err or tostring(result)) or ''
	for _, refusal in ipairs(REFUSALS) do
		if string.find(why, refusal, 1, true) then return redis.error_reply(refusal .. ': ' .. why) end
	end
	answers[i] = done and result or struct.pack(ANSWER.format, BROKEN, 0, 0, 0, 0, 0, SLOW, 0, 0, 0, 0, 0, 0, 0)
end
return answers
