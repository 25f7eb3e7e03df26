-- The rules of the model, as far as scripts apply them.
local function int(number)
  return string.format('%.0f', number)
end
local function at_most(one, other)
  return #one < #other or (#one == #other and one <= other)
end
local function fits(held, owners, whole, count, limit)
  if whole then
    return false
  elseif count == limit then
    return owners == 0
  end
  return not at_most(limit, EXACT) or held + count <= tonumber(limit)
end
local function changed(path, name, what)
  if watched then
    call('PUBLISH', P .. 'c:' .. meta[1] .. ':' .. path .. ':' .. name, what)
  end
end
local function next_order(seen)
  local order = math.max(meta[2] + 1, seen + 1, now)
  call('HSET', KEYS[1], 'o', int(order))
  return int(order)
end
